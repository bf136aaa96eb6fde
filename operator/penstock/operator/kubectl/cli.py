"""The commands `penstock status`, `top`, `capacity`, `events`, `drain`. Light to import: `penstock --help` loads this module."""

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.flag_values import above_zero, not_negative, port
from penstock.operator.command_line import add_namespace, add_server, run


def status(argv: list[str]) -> int:
    """Shows models, their pools, replicas and adapters as a tree, with what is wrong.

    Returns 0, also where models are not ready; 1 where the API server refuses or there is no such model; 2 where there is no API
    server to go to.
    """
    parser = _parser(status, everywhere=True)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="only this one")
    options = parser.parse_args(argv)
    if options.local:
        from penstock.operator.kubectl import local

        return _run_local(options, local.status)
    from penstock.operator.kubectl import tree

    return _run(options, tree.run)


def top(argv: list[str]) -> int:
    """Shows what each replica is doing, as the gateways see it, until Ctrl-C."""
    parser = _parser(top, everywhere=True)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="only this one")
    parser.add_argument("--once", action="store_true", help="show it once and exit; the default unless the output is a terminal")
    parser.add_argument(
        "--every", type=above_zero, default=2.0, metavar="SECONDS", help="time between updates (default: %(default)s)"
    )
    _add_gateways(parser)
    from penstock.operator.kubectl import top as command

    options = parser.parse_args(argv)
    return _run_local(options, command.run) if options.local else _run(options, command.run)


def capacity(argv: list[str]) -> int:
    """Shows the replicas, devices and cost of every pool, what holds it back, and the sums."""
    parser = _parser(capacity, everywhere=True, local=False)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="only this one")
    from penstock.operator.kubectl import capacity as command

    return _run(parser.parse_args(argv), command.run)


def events(argv: list[str]) -> int:
    """Lists the Events of a model and of everything that was made for it, oldest first."""
    parser = _parser(events)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-w", "--watch", action="store_true", help="keep printing new Events until Ctrl-C")
    from penstock.operator.kubectl import events as command

    return _run(parser.parse_args(argv), command.run)


def drain(argv: list[str]) -> int:
    """Takes replicas out of service without losing a request, one by one, and lets their pools replace them."""
    parser = _parser(drain)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("pod", nargs="?", metavar="POD", help="a replica")
    what.add_argument("--node", help="all replicas on this node, of all namespaces; the node is cordoned first")
    parser.add_argument(
        "--timeout",
        type=not_negative,
        default=600.0,
        metavar="SECONDS",
        help="time limit for each replica (default: %(default)g)",
    )
    parser.add_argument("--force", action="store_true", help="drain even the last ready replica of a pool")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--keep", action="store_true", help="only stop new requests to it; do not replace it")
    how.add_argument("--undo", action="store_true", help="let it get new requests again")
    _add_gateways(parser)
    from penstock.operator.kubectl import drain as command

    return _run(parser.parse_args(argv), command.run)


def _parser(command: Callable[[list[str]], int], *, everywhere: bool = False, local: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"penstock {command.__name__}", description=(command.__doc__ or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group()
    add_namespace(where)
    if everywhere:
        where.add_argument("-A", "--all-namespaces", action="store_true")
    if everywhere and local:
        where.add_argument(
            "--local", action="store_true", help="show what `penstock up` runs on this machine instead of a cluster"
        )
    add_server(parser)
    return parser


def _add_gateways(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-namespace", default="penstock-system", help="namespace of the gateways (default: %(default)s)")
    parser.add_argument("--gateway-http-port", type=port, default=9090, help="gateways' port for /pools (default: %(default)s)")


def _run(options: argparse.Namespace, command: Callable[[Any, argparse.Namespace], Awaitable[None]]) -> int:
    from penstock.operator.kubectl.cluster import connected

    async def asked() -> None:
        async with connected(options) as cluster:
            await command(cluster, options)

    return run("penstock", asked)


def _run_local(options: argparse.Namespace, command: Callable[[Any, argparse.Namespace], Awaitable[None]]) -> int:
    from penstock.operator.kubectl.local import local_gateway

    async def asked() -> None:
        await command(local_gateway(), options)

    return run("penstock", asked)
