"""The results of a run."""

from dataclasses import dataclass

from penstock.client.bench.records import Record
from penstock.client.bench.report import Report
from penstock.client.bench.saturation import Saturation


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    model: str
    start: float
    records: list[Record]
    report: Report
    saturation: Saturation | None
    missed_looks: int
    cpu_share: float
    """Share of one core that this process used. Near 1, the latencies are the client's own."""
    cpu_us_per_token: float | None
    interrupted: bool
