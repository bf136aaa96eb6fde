"""`penstock epp-conformance`: judges any endpoint picker by the protocol that it speaks."""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.flag_values import above_zero, positive
from penstock.gateway.conformance import report
from penstock.gateway.conformance.bench import Bench
from penstock.gateway.conformance.check import Group
from penstock.gateway.conformance.outcome import is_endpoint
from penstock.gateway.conformance.rig import Rig
from penstock.gateway.conformance.runner import Result, run, selected
from penstock.gateway.conformance.suite import GROUPS, OWN
from penstock.gateway.conformance.target import Target
from penstock.gateway.envoy import host_port

WIDTH = 130


def main(argv: Sequence[str]) -> int:
    """Runs the suite; 0: every MUST is kept, 1: not so, 2: it could not be run."""
    parser = _parser()
    options = parser.parse_args(argv)
    groups = (*GROUPS, *OWN) if options.penstock else GROUPS
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
    target = _target(options)
    try:
        results = asyncio.run(_run(target, checks, options.at_once))
    except OSError as error:
        sys.stderr.write(f"penstock epp-conformance: {error}\n")
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
        prog="penstock epp-conformance",
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
    add("--timeout", type=above_zero, default=5.0, metavar="S", help="for one answer (default: %(default)s)")
    add("--at-once", type=positive, default=1, metavar="N", help="checks to make beside each other (default: %(default)s)")
    add("--only", action="append", default=[], metavar="PATTERN", help="checks or groups, as shell patterns; repeat")
    add("--skip", action="append", default=[], metavar="PATTERN", help="the same, left out")
    add("--strict", action="store_true", help="a SHOULD that fails counts like a MUST")
    add("--penstock", action="store_true", help="also Penstock's own extensions")
    add("--envoy", metavar="FILE", help="Envoy's binary (default: the one installed with Penstock)")
    add("--json", type=Path, metavar="FILE", help="write the results here too")
    add("--list", action="store_true", help="list the checks and end")
    return parser


def _address(text: str) -> tuple[str, int]:
    try:
        return host_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _endpoint(text: str) -> str:
    if not is_endpoint(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not IP:PORT (IPv6 in brackets)")
    return text
