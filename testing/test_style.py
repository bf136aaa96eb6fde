"""Documents and docstrings avoid what `docs/style.md` tells writers to avoid."""

import ast
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


def broken(source: str) -> list[str]:
    """A word or two that stand alone between two full lines of a docstring."""
    lines = source.split("\n")
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    found: list[str] = []
    for text in texts:
        for at in range(text.lineno, (text.end_lineno or 0) - 1):
            before, line, after = (lines[n].rstrip() for n in (at - 1, at, at + 1))
            goes_on = after.strip() and not re.match(r"\s*(\w+: |[-*|`\"])", after)
            if len(before) > 110 and 0 < len(line) < 40 and goes_on and not line.endswith((".", ":")):
                found.append(line.strip())
    return found


def test_no_docstring_of_the_gateway_is_broken_within_a_sentence() -> None:
    found = {str(file): words for file in (ROOT / "gateway/penstock").rglob("*.py") if (words := broken(file.read_text()))}
    assert not found
    assert broken(f'"""{"word " * 24}\nfor\nthe same."""\n') == ["for"]
