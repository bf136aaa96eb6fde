"""The command `penstock rollout`. Light to import: `penstock --help` loads this module."""

import argparse
import sys

from penstock.flag_values import not_negative, positive
from penstock.operator.command_line import add_namespace, add_server, run


def rollout(argv: list[str]) -> int:
    """Shows, pauses, resumes, restarts and undoes the rollout of a model.

    Returns 0 when it is done, 1 when it is refused, fails or takes longer than --timeout, 2 where no API server can be reached.
    """
    options = parser().parse_args(argv)
    from penstock.operator.rollout import commands

    return run("penstock rollout", lambda: commands.run(options, sys.stdout.write))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("model", metavar="MODEL", help="name of the InferenceModel")
    add_namespace(common)
    add_server(common)
    made = argparse.ArgumentParser(prog="penstock rollout", description=(rollout.__doc__ or "").partition("\n")[0])
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=text, description=text)

    status = add("status", "Waits until the present spec serves, and says what it waits for.")
    status.add_argument("--timeout", type=not_negative, metavar="SECONDS", help="time limit (default: none)")
    status.add_argument("--no-wait", dest="wait", action="store_false", help="print the present state and exit")
    add("pause", "Leaves running replicas as they are until `resume`.")
    add("resume", "Goes on after `pause`.")
    add("restart", "Replaces every replica, at the pace of a rollout, by the templates of the running operator.")
    undo = add("undo", "Writes the spec of an old revision back.")
    undo.add_argument(
        "--to-revision", type=positive, metavar="N", help="revision number of `history` (default: the previous revision)"
    )
    add("history", "Lists the revisions.")
    return made
