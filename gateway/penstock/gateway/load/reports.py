"""The newest load report of each replica, whatever carried it, and how old it is."""

import msgspec

from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import ReplicaKey


class Heard(msgspec.Struct):
    """The newest report of a replica."""

    report: LoadReport
    at: float
    """When it was received, or confirmed by an equal one; monotonic seconds."""


class ReportStore:
    """Reports by replica. Of one epoch the highest `seq` wins, and a newer epoch wins over any older one, so that carriers may
    deliver in any order."""

    def __init__(self) -> None:
        self._heard: dict[ReplicaKey, Heard] = {}

    def observe(self, key: ReplicaKey, report: LoadReport, now: float) -> bool:
        """Takes in a report received at `now`; says whether the replica has restarted since the one before."""
        heard = self._heard.get(key)
        if heard is None:
            self._heard[key] = Heard(report, now)
            return False
        old = heard.report
        if (report.epoch, report.seq) < (old.epoch, old.seq):
            return False
        heard.report, heard.at = report, now
        return report.epoch != old.epoch

    def get(self, key: ReplicaKey) -> Heard | None:
        """What was heard of `key`; None where nothing was."""
        return self._heard.get(key)

    def drop(self, key: ReplicaKey) -> None:
        """Forgets a replica that is gone."""
        self._heard.pop(key, None)

    def silent(self, keys: list[ReplicaKey], now: float, after_s: float) -> list[ReplicaKey]:
        """Those of `keys` that have not been heard for `after_s` seconds."""
        return [key for key in keys if (heard := self._heard.get(key)) is None or now - heard.at >= after_s]
