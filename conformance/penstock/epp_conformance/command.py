"""The command. Light to import: `penstock --help` loads it where both packages are installed."""

import sys
from collections.abc import Sequence


def judge(argv: Sequence[str] | None = None) -> int:
    """Judges any endpoint picker by the protocol that it speaks."""
    from penstock.epp_conformance.cli import main

    return main(sys.argv[1:] if argv is None else argv)
