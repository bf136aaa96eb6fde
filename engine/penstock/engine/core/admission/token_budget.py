"""Something of the step's tokens must be left."""

from penstock.api.load_report import WaitingReason
from penstock.engine.core.admission.rule import Candidate


class TokenBudget:
    """Refuses once the step is full. One token is enough: prompts are computed in chunks."""

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """Why the candidate must wait."""
        return "capacity" if candidate.token_budget < 1 else None
