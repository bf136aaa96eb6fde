"""The `penstock` command: a thin dispatcher. Each component registers its subcommands as entry points of the group
`penstock.commands`.

An entry point is a function `(argv: list[str]) -> int` whose docstring's first line is its help. It names the extras that it
needs, so that an image without a component simply has no such command.

Under the name `kubectl-penstock` the same is a plugin of kubectl: `kubectl penstock COMMAND`.
"""

import re
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, requires, version
from pathlib import Path

from penstock.suggest import suggestion

GROUP = "penstock.commands"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+).*;.*\bextra == ['\"]([a-z]+)['\"]")


def main(argv: list[str] | None = None) -> int:
    """Runs the subcommand named by the first argument and returns its exit status; 2 where there is none of that name."""
    arguments = sys.argv[1:] if argv is None else argv
    every = {entry.name: entry for entry in entry_points(group=GROUP)}
    commands = {name: entry for name, entry in every.items() if not _missing(entry)}
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_usage(commands))
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"penstock {version('penstock')}\n")
        return 0
    if name in every and name not in commands:
        extras, packages = ", ".join(every[name].extras), ", ".join(_missing(every[name]))
        sys.stderr.write(f"penstock: {name} is part of penstock[{extras}], which is not installed here (missing: {packages})\n")
        return 2
    if name not in commands:
        sys.stderr.write(f"penstock: no command {name!r}{suggestion(name, commands)}\npenstock --help lists the commands\n")
        return 2
    return commands[name].load()(rest)


def _missing(entry: EntryPoint) -> list[str]:
    """Distributions that the command's extras need and that are not installed."""
    needed = [match[1] for line in requires("penstock") or [] if (match := _REQUIREMENT.match(line)) and match[2] in entry.extras]
    return [name for name in needed if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _usage(commands: dict[str, EntryPoint]) -> str:
    program = Path(sys.argv[0]).name.replace("kubectl-", "kubectl ")
    program = program if program in ("penstock", "kubectl penstock") else "penstock"
    lines = [f"usage: {program} COMMAND [ARGUMENTS …]\n\n{program} COMMAND --help shows the flags of a command.\n"]
    width = max(map(len, commands), default=0)
    for name in sorted(commands):
        summary = (commands[name].load().__doc__ or "").strip().partition("\n")[0]
        lines.append(f"  {name:<{width}}  {summary}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
