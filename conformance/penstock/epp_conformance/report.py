"""What people and machines read of a run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.epp_conformance.check import Group, Level
from penstock.epp_conformance.runner import Outcome, Result
from penstock.epp_conformance.target import Target

_COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.NOT_APPLICABLE: "yellow"}


def passed(results: Iterable[Result], strict: bool) -> bool:
    """Whether no MUST failed; with `strict` nothing at all."""
    return not any(r.outcome is Outcome.FAIL and (strict or r.check.level is Level.MUST) for r in results)


def as_json(target: Target, results: Sequence[Result]) -> dict[str, Any]:
    """Return all results as JSON."""
    return {
        "target": target.address,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "summary": {level.value: _counts(results, level) for level in Level},
        "checks": [
            {
                "name": r.check.name,
                "group": r.group,
                "level": r.check.level.value,
                "outcome": r.outcome.value,
                "detail": r.detail,
                "seconds": round(r.seconds, 3),
                "statement": r.check.statement,
                "source": r.check.source,
            }
            for r in results
        ],
    }


def show(console: Console, groups: Sequence[Group], results: Sequence[Result]) -> None:
    """A table of results, and a line that sums them up."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "level", "", "what the picker does"):
        table.add_column(column, overflow="fold")
    titles = {group.name: group.title for group in groups}
    shown = ""
    for result in results:
        if result.group != shown:
            shown = result.group
            table.add_row(f"[bold]{escape(titles[shown])}[/bold]")
        colour = _COLOURS[result.outcome]
        said = escape(result.detail) if result.outcome is Outcome.NOT_APPLICABLE else _told(result)
        table.add_row(f"  {result.check.name}", result.check.level.value, f"[{colour}]{result.outcome.value}[/{colour}]", said)
    console.print(table)
    for level in Level:
        counts = _counts(results, level)
        console.print(f"{level.value}: {counts['pass']} pass, {counts['fail']} fail, {counts['n/a']} not applicable")


def _told(result: Result) -> str:
    """The rule that is kept; of one that is not, what happened."""
    statement = escape(result.check.statement)
    if result.outcome is Outcome.PASS:
        return f"[dim]{statement}[/dim]"
    return f"[red]{escape(result.detail)}[/red]\n[dim]{statement} ({escape(result.check.source)})[/dim]"


def _counts(results: Iterable[Result], level: Level) -> dict[str, int]:
    counts = Counter(r.outcome.value for r in results if r.check.level is level)
    return {outcome.value: counts[outcome.value] for outcome in Outcome}


def listing(groups: Iterable[Group]) -> str:
    """All checks as Markdown, for `--list` and for the documentation."""
    lines: list[str] = []
    for group in groups:
        lines += [
            f"### {group.title} (`{group.name}`)",
            "",
            "| check | level | a picker keeps this rule | source |",
            "| --- | --- | --- | --- |",
        ]
        lines += [f"| `{c.name}` | {c.level.value} | {_cell(c.statement)} | {_cell(c.source)} |" for c in group.checks]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
