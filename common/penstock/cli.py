"""The `penstock` command: a thin dispatcher. Each component registers its subcommands as entry points of the group
`penstock.commands`.

An entry point is a function `(argv: list[str]) -> int` whose docstring's first line is its help; an image without a component
has no such command.
"""

import sys
from importlib.metadata import EntryPoint, entry_points, version

GROUP = "penstock.commands"


def main(argv: list[str] | None = None) -> int:
    """Runs the subcommand named by the first argument and returns its exit status; 2 where there is none of that name."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_usage(commands))
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"penstock {version('penstock')}\n")
        return 0
    if name not in commands:
        sys.stderr.write(f"penstock: there is no command {name!r} here\n\n{_usage(commands)}")
        return 2
    return commands[name].load()(rest)


def _usage(commands: dict[str, EntryPoint]) -> str:
    lines = ["usage: penstock COMMAND [ARGUMENTS …]     penstock COMMAND --help says more\n"]
    for name in sorted(commands):
        try:
            summary = (commands[name].load().__doc__ or "").strip().partition("\n")[0]
        except ImportError as error:
            summary = f"not installed ({error.name})"
        lines.append(f"  {name:<12} {summary}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
