"""docs/operator/troubleshooting.md has every condition and every reason that the code can give, and none that it cannot."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import penstock.operator
from penstock.operator.adapters import sync
from penstock.operator.canary.course import Standing
from penstock.operator.conditions import JUDGES
from penstock.operator.observed import ScalingStatus
from penstock.sources.errors import Reason

PAGE = Path(__file__).parents[2] / "docs" / "operator" / "troubleshooting.md"
CODE = [file for folder in penstock.operator.__path__ for file in sorted(Path(folder).rglob("*.py"))]
SAY_TUPLES = ("status.py", "routes.py", "fetching.py")
WORD = re.compile(r"[A-Z][a-zA-Z]+")
# The argument that is the reason, of whatever says one.
POSITION = {"Verdict": 1, "Refusal": 0, "Fetching": 0, "Trouble": 1}
KUBELETS = {
    "Unschedulable", "SchedulingGated", "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox",
    "Evicted", "UnexpectedAdmissionError",
}  # fmt: skip
"""Passed on as they are: the page has those that are met most often."""


def words(node: ast.AST) -> Iterator[str]:
    """The CamelCase words that an expression may be: a constant, either side of a condition, a default."""
    match node:
        case ast.Constant(value=str(text)) if WORD.fullmatch(text):
            yield text
        case ast.IfExp():
            yield from (*words(node.body), *words(node.orelse))
        case ast.BoolOp():
            yield from (word for value in node.values for word in words(value))
        case ast.Call(func=ast.Attribute(attr="get"), args=[_, default]):
            yield from words(default)


def said() -> set[str]:
    """Every reason that stands in the operator's code."""
    found: set[str] = set()
    for file in CODE:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in POSITION:
                found |= {word for argument in node.args[POSITION[node.func.id] :][:1] for word in words(argument)}
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["reason"]:
                found |= set(words(node.value))
            # (reason, message), or (status, reason, message), where it is not yet a verdict
            if isinstance(node, ast.Tuple) and len(node.elts) in (2, 3) and file.name in SAY_TUPLES:
                found |= set(words(node.elts[len(node.elts) - 2]))
    found = (found - set(get_args(Reason))) | {f"Source{reason}" for reason in get_args(Reason)}
    found |= {idle for idle in get_args(get_type_hints(ScalingStatus)["idle"]) if idle}
    verdicts = set(get_args(get_type_hints(Standing)["verdict"]))
    return found | {f"Canary{verdict}" for verdict in verdicts - {"Judging"}}


def page() -> dict[str, set[str]]:
    """The reasons of the page by heading: first cells of tables, and those that are good."""
    found: dict[str, set[str]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
        good = re.findall(r"^Good: (.*)$", text, re.MULTILINE)
        found[heading] = set(re.findall(r"`([A-Z][a-zA-Z]+)`", " ".join(cells + good)))
    return found


def test_every_condition_has_its_section() -> None:
    headings = set(page())
    assert set(JUDGES) | {"LoraAdapters"} <= headings
    text = PAGE.read_text()
    assert all(f"`{kind}`" in text for kind in sync.TYPES)


def test_every_reason_is_on_the_page() -> None:
    reasons = said()
    assert {"EngineExited", "GatewaysSilent", "SourceNoSpace", "FetchFailed", "DryRun", "CanaryFailed", "LoadFailed"} <= reasons
    missing = reasons - {reason for those in page().values() for reason in those}
    assert not missing, "the code says these, and nobody is told what to do"


def test_the_page_has_no_reason_that_nobody_gives() -> None:
    invented = {reason for those in page().values() for reason in those} - said() - KUBELETS
    assert not invented
