"""Counters and histograms as ranges of one vector of numbers: a token costs no call into a metrics library, and processes that
share a table of such vectors can tell the sum."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

Float64 = npt.NDArray[np.float64]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class SeriesTable:
    """What a process counts. Declare all series first: equal declarations make equal vectors."""

    def __init__(self) -> None:
        self.own: Float64 = np.zeros(0)
        """[size]: this process's numbers."""
        self._rows: Float64 = self.own[None]
        self._series: list[Counter | Histogram] = []

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return len(self.own)

    def counter(self, name: str, help_text: str, label: str = "", values: Sequence[str] = ("",)) -> "Counter":
        """Add a counter, with one series for each value of its label if it has one. All series start at zero."""
        return self._add(Counter(self, self.size, name, help_text, label, values))

    def histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> "Histogram":
        """A new histogram with the upper bounds of its buckets."""
        return self._add(Histogram(self, self.size, name, help_text, bounds))

    def share(self, rows: Float64, number: int) -> None:
        """Continue to count in a row of a table, [processes, size], that other processes count in too.

        `families` reports the sum of its rows from now on. Present counts move along. A row keeps the counts of an earlier
        process.
        """
        rows[number] += self.own
        self._rows, self.own = rows, rows[number]

    def families(self, labels: dict[str, str]) -> list[Family]:
        """Return every series with its present value and these labels."""
        totals = self._rows.sum(axis=0)
        return [series.family(labels, totals) for series in self._series]

    def totals(self) -> Float64:
        """[size]: over all rows."""
        return self._rows.sum(axis=0)

    def _add(self, series: "S") -> "S":
        self._series.append(series)
        self.own = np.zeros(self.size + series.width)
        self._rows = self.own[None]
        return series


class Counter:
    """Numbers that only grow, one a value of its label."""

    def __init__(self, table: SeriesTable, start: int, name: str, help_text: str, label: str, values: Sequence[str]) -> None:
        self._table = table
        self._at = {value: start + at for at, value in enumerate(values)}
        self._name = name
        self._help = help_text
        self._label = label
        self.width = len(values)

    def add(self, amount: float, value: str = "") -> None:
        """Counts for one value of the label."""
        self._table.own[self._at[value]] += amount

    def by_value(self, totals: Float64) -> dict[str, float]:
        """The numbers in `SeriesTable.totals`."""
        return {value: float(totals[at]) for value, at in self._at.items()}

    def family(self, labels: dict[str, str], totals: Float64) -> Family:
        """For one scrape."""
        family = CounterMetricFamily(self._name, self._help, labels=[*labels, *([self._label] if self._label else [])])
        for value, number in self.by_value(totals).items():
            family.add_metric([*labels.values(), *([value] if self._label else [])], number)
        return family


class Histogram:
    """Counts by bucket, and the sum."""

    def __init__(self, table: SeriesTable, start: int, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._table = table
        self._start = start
        self._name = name
        self._help = help_text
        self._bounds = list(bounds)
        self.width = len(bounds) + 2

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times, in the first bucket whose bound is not below it."""
        own = self._table.own
        own[self._start + bisect_left(self._bounds, value)] += times
        own[self._start + self.width - 1] += value * times

    def family(self, labels: dict[str, str], totals: Float64) -> Family:
        """For one scrape."""
        range_ = totals[self._start : self._start + self.width]
        return histogram_family(self._name, self._help, labels, self._bounds, range_[:-1].tolist(), float(range_[-1]))


S = TypeVar("S", Counter, Histogram)


def histogram_family(
    name: str, help_text: str, labels: dict[str, str], bounds: Sequence[float], counts: Sequence[float], total: float
) -> HistogramMetricFamily:
    """A histogram from the count of each bucket, the last one's without a bound, and the sum of the values."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    family = HistogramMetricFamily(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), list(zip(names, np.cumsum(counts).tolist(), strict=True)), total)
    return family
