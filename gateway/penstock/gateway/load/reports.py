"""The newest load report of each replica, whatever carried it, and how old it is."""

from typing import Final

from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import Said

GONE_S: Final = 5.0
"""What was not heard of for so long has no late reports any more: it was asked four times meanwhile."""


class Heard:
    """The newest report of a replica.

    Args:
        newest: The report, as it was read.
        at: When it was received, or confirmed by an equal one; monotonic seconds.
    """

    __slots__ = ("_report", "at", "newest")

    def __init__(self, newest: LoadReport | Said, at: float) -> None:
        self.take(newest, at)

    def take(self, newest: LoadReport | Said, at: float) -> None:
        """Another one has come."""
        self.newest, self.at = newest, at
        self._report: LoadReport | None = None

    @property
    def report(self) -> LoadReport:
        """The report with all its fields."""
        if self._report is None:
            newest = self.newest
            self._report = newest if isinstance(newest, LoadReport) else LoadReport(*newest.fields())
        return self._report


class ReportStore:
    """Reports by replica. Of one epoch the highest `seq` wins, and a later epoch wins over any earlier one, so that carriers may
    deliver in any order: a report on a response may come after that of the process which has taken its place.

    Epochs are clocks, which may be set back between two starts. Then the new process has the earlier epoch, and counts once the
    old one has been silent for `GONE_S`.
    """

    def __init__(self) -> None:
        self.heard: dict[ReplicaKey, Heard] = {}

    def observe(self, key: ReplicaKey, report: LoadReport | Said, now: float) -> bool:
        """Takes in a report received at `now`; says whether the replica has restarted since the one before."""
        heard = self.heard.get(key)
        if heard is None:
            self.heard[key] = Heard(report, now)
            return False
        old = heard.newest
        late = report.epoch < old.epoch and now - heard.at < GONE_S
        if late or (report.epoch == old.epoch and report.seq < old.seq):
            return False
        heard.take(report, now)
        return report.epoch != old.epoch

    def get(self, key: ReplicaKey) -> Heard | None:
        """What was heard of `key`; None where nothing was."""
        return self.heard.get(key)

    def heard_after(self, key: ReplicaKey, moment: float) -> bool:
        """Whether the newest report of `key` came after that moment."""
        heard = self.heard.get(key)
        return heard is not None and heard.at > moment

    def idle(self, key: ReplicaKey, after: float) -> bool:
        """Whether the newest report of `key` came after that moment and says that nothing runs or waits there."""
        if not self.heard_after(key, after):
            return False
        report = self.heard[key].report
        return not (report.num_requests_running or report.waiting or report.kv_cache_usage_perc)

    def drop(self, key: ReplicaKey) -> None:
        """Forgets a replica that is gone."""
        self.heard.pop(key, None)

    def silent(self, keys: list[ReplicaKey], now: float, after_s: float) -> list[ReplicaKey]:
        """Return those of `keys` without a report for `after_s` seconds."""
        return [key for key in keys if (heard := self.heard.get(key)) is None or now - heard.at >= after_s]
