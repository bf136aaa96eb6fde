"""The checks of our own extensions, beside the suite's."""

from pathlib import Path

from own_checks import OWN

from penstock.epp_conformance.report import listing
from penstock.epp_conformance.suite import GROUPS

PAGE = Path(__file__).parents[3] / "docs/gateway/conformance.md"


def test_names_are_not_the_suites_and_statements_are_sentences() -> None:
    ours = [check for group in OWN for check in group.checks]
    suites = {check.name for group in GROUPS for check in group.checks}
    assert len({check.name for check in ours} - suites) == len(ours)
    for check in ours:
        assert check.statement.endswith(".") and check.source, check.name


def test_the_documented_list_is_ours() -> None:
    documented = PAGE.read_text().partition("<!-- own checks -->\n")[2].partition("<!-- end of own checks -->")[0]
    assert documented.strip() == listing(OWN).strip()
