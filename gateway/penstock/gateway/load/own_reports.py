"""The load reports of our own engines, which come with each response."""

import msgspec

from penstock.api import load_report
from penstock.api.events import BEYOND, absurd
from penstock.api.load_report import FIGURES, WAITING, WAITING_REASONS, LoadReport, LoadReportError
from penstock.gateway.picker.compiled import Compiled, ReportReader, Said


class OwnReports:
    """Reads them.

    Args:
        compiled: What reads them as our engines write them; None: Python. Others, and those that are wrong, are always Python's.
    """

    def __init__(self, compiled: Compiled | None) -> None:
        self.reader: ReportReader | None = None
        if compiled is not None:
            figures = [(name, kind is int) for name, kind in FIGURES]
            place = [field.name for field in msgspec.structs.fields(LoadReport)].index(WAITING)
            self.reader = compiled.ReportReader(figures, WAITING, WAITING_REASONS, place, BEYOND)

    def read(self, value: str) -> LoadReport | Said:
        """The report in a header's value; raises `LoadReportError` where there is none, or none that a replica can send."""
        if self.reader is not None and (found := self.reader.read(value)) is not None:
            return found
        return sane(load_report.decode(value))


def sane(report: LoadReport) -> LoadReport:
    """The report; raises `LoadReportError` for figures that no replica can have."""
    if (why := absurd(report)) is not None:
        raise LoadReportError(why)
    return report
