"""Documents avoid the phrases that `docs/style.md` tells writers to avoid."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RIDDLES = re.compile(
    r"\b(whoever|of whom|what is said of|nobody is told|somebody else|mend(s|ed)?|begins? anew|without end|is told of)\b", re.I
)
EXEMPT = ("docs/style.md", "docs/requirements/")
"""The first quotes the phrases, the second holds the words of others."""


def test_pages_hold_no_riddles() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    names = {str(page.relative_to(ROOT)): page.read_text() for page in pages}
    found = {name for name, text in names.items() if not name.startswith(EXEMPT) and RIDDLES.search(" ".join(text.split()))}
    assert not found
