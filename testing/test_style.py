"""Documents and docstrings avoid what `docs/style.md` tells writers to avoid."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
RIDDLES = re.compile(
    r"\b(whoever|of whom|what is said of|nobody is told|somebody else|mend(s|ed)?|begins? anew|without end|is told of)\b", re.I
)
EMPTY = re.compile(r'"""(Nothing\.|See `?[\w.]+`?\.?|After loading\.)\s*"""')
"""Docstrings that say nothing of what is documented."""
EXEMPT = ("docs/style.md", "docs/requirements/")
"""The first quotes the phrases, the second holds the words of others."""


def test_pages_hold_no_riddles() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    names = {str(page.relative_to(ROOT)): page.read_text() for page in pages}
    found = {name for name, text in names.items() if not name.startswith(EXEMPT) and RIDDLES.search(" ".join(text.split()))}
    assert not found


def test_docstrings_say_something() -> None:
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 1_000
    empty = [f"{file}: {found[1]}" for file in files for found in EMPTY.finditer((ROOT / file).read_text())]
    assert not empty
