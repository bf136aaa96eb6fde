"""Links between pages of the documentation lead somewhere, and no page of the operator's manual is left out of its index."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them, and those that it names itself."""
    text = without_code(page)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    made = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def test_links_lead_somewhere() -> None:
    dead: list[str] = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead


def test_every_page_of_the_operator_is_in_its_manual() -> None:
    folder = ROOT / "docs" / "operator"
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (folder / "README.md").read_text()))
    assert linked >= {page.name for page in folder.glob("*.md")} - {"README.md"}
