"""Require that the step has tokens left."""

from penstock.api.load_report import WaitingReason
from penstock.engine.core.scheduling.admission.rule import Candidate


class TokenBudget:
    """Refuses once the step is full.

    Args:
        chunked: Prompts are computed in chunks, so that one token is enough; otherwise all that is not cached must fit.
    """

    def __init__(self, *, chunked: bool) -> None:
        self._chunked = chunked

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """Why the candidate must wait."""
        if candidate.token_budget < 1:
            return "capacity"
        if self._chunked:
            return None
        return "capacity" if candidate.num_tokens - candidate.hit.num_tokens > candidate.token_budget else None
