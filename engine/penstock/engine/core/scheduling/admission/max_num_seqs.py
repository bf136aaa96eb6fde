"""Limit the running requests to the number of rows."""

from penstock.api.load_report import WaitingReason
from penstock.engine.core.scheduling.admission.rule import Candidate


class MaxNumSeqs:
    """Refuses while every row is taken."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """Why the candidate must wait."""
        return "capacity" if candidate.num_running >= self._max_num_seqs else None
