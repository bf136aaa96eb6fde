"""The page that lists the suite's checks lists ours beside them."""

from pathlib import Path

from own_checks import OWN

from penstock.epp_conformance.report import listing

PAGE = Path(__file__).parents[3] / "docs/gateway/conformance.md"


def test_the_documented_list_is_ours() -> None:
    documented = PAGE.read_text().partition("<!-- own checks -->\n")[2].partition("<!-- end of own checks -->")[0]
    assert documented.strip() == listing(OWN).strip()
