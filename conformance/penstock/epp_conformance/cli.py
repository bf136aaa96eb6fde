"""`penstock-epp-conformance`: judges any endpoint picker by the protocol that it speaks."""

import argparse
import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from penstock.epp_conformance import report
from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import Group
from penstock.epp_conformance.outcome import is_endpoint
from penstock.epp_conformance.rig import Rig
from penstock.epp_conformance.runner import Result, run, selected
from penstock.epp_conformance.suite import GROUPS
from penstock.epp_conformance.target import Target

PROGRAM = "penstock-epp-conformance"
WIDTH = 130


def main(argv: Sequence[str], more: Sequence[Group] = ()) -> int:
    """Runs the suite, and after it `more` of a project's own checks; 0: every MUST is kept, 1: not so, 2: it could not be run."""
    parser = _parser()
    options = parser.parse_args(argv)
    groups = (*GROUPS, *more)
    try:
        checks = selected(groups, options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        names = {check.name for _, check in checks}
        shown = [Group(g.name, g.title, tuple(c for c in g.checks if c.name in names)) for g in groups]
        sys.stdout.write(report.listing(group for group in shown if group.checks))
        return 0
    for name in ("target", "model", "endpoint"):
        if not getattr(options, name):
            parser.error(f"--{name} is needed")
    if options.at_once < 1:
        parser.error(f"--at-once: {options.at_once} is not at least 1")
    if not 0 < options.timeout < math.inf:
        parser.error(f"--timeout: {options.timeout:g} is not above 0 and finite")
    target = _target(options)
    try:
        results = asyncio.run(_run(target, checks, options.at_once))
    except OSError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    report.show(Console(width=None if sys.stdout.isatty() else WIDTH), groups, results)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(target, results), indent=1) + "\n")
    return 0 if report.passed(results, options.strict) else 1


async def _run(target: Target, checks: Sequence[tuple[Group, object]], at_once: int) -> list[Result]:
    """Run the checks. Raises OSError if nothing listens at the target, or an address to serve is taken."""
    async with contextlib.AsyncExitStack() as stack:
        rig = await stack.enter_async_context(Rig(target)) if target.serve else None
        _, writer = await asyncio.open_connection(target.host, target.port)
        writer.close()
        channel = await stack.enter_async_context(await target.channel())
        return [result async for result in run(checks, Bench(target, channel, rig), at_once)]  # type: ignore[arg-type]


def _target(options: argparse.Namespace) -> Target:
    host, port = options.target
    return Target(
        host=host,
        port=port,
        model=options.model,
        endpoints=tuple(options.endpoint),
        health=options.health or options.target,
        path=options.path,
        tls=options.tls,
        tls_ca=options.tls_ca,
        timeout_s=options.timeout,
        serve=options.serve_endpoints,
        envoy=options.envoy,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Judge an endpoint picker by the endpoint-picker protocol and by what Envoy's ext_proc filter takes.",
    )
    add = parser.add_argument
    add("--target", type=_address, metavar="HOST:PORT", help="the picker's ext_proc port")
    add("--model", metavar="NAME", help="a model that the picker serves")
    add("--endpoint", type=_endpoint, action="append", default=[], metavar="IP:PORT", help="a replica it was told of; repeat")
    add("--serve-endpoints", action="store_true", help="serve these endpoints here, and look through a real Envoy too")
    add("--health", type=_address, metavar="HOST:PORT", help="where gRPC health is (default: the target)")
    add("--path", default="/v1/completions", help="what is asked for (default: %(default)s)")
    add("--tls", action="store_true", help="the ext_proc port speaks TLS; as gateways do, its certificate is not verified")
    add("--tls-ca", type=Path, metavar="FILE", help="PEM: the CA of the picker's certificate, unless that is self-signed")
    add("--timeout", type=float, default=5.0, metavar="S", help="for one answer (default: %(default)s)")
    add("--at-once", type=int, default=1, metavar="N", help="checks to make beside each other (default: %(default)s)")
    add("--only", action="append", default=[], metavar="PATTERN", help="checks or groups, as shell patterns; repeat")
    add("--skip", action="append", default=[], metavar="PATTERN", help="the same, left out")
    add("--strict", action="store_true", help="a SHOULD that fails counts like a MUST")
    add("--envoy", metavar="FILE", help="Envoy's binary (default: the one installed with the suite)")
    add("--json", type=Path, metavar="FILE", help="write the results here too")
    add("--list", action="store_true", help="list the checks and end")
    return parser


def _address(text: str) -> tuple[str, int]:
    with contextlib.suppress(ValueError):  # a port that is none
        url = urlsplit(f"//{text}")
        if url.netloc == text and url.hostname and url.port and url.username is None:
            return url.hostname, url.port
    raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT (IPv6 in brackets)")


def _endpoint(text: str) -> str:
    if not is_endpoint(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not IP:PORT (IPv6 in brackets)")
    return text
