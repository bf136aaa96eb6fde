"""The image with which a request begins must have room in the tower's budget and in the cache of embeddings."""

from penstock.api.load_report import WaitingReason
from penstock.engine.core.scheduling.admission.rule import Candidate
from penstock.engine.core.scheduling.images.encoder import Encoder


class EncoderRoom:
    """Refuses a request that could not compute a single token before an image for which this step has no room. If the image's run
    needs several steps, it begins all the same."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """Why the candidate must wait."""
        if not candidate.request.images:
            return None
        start, budget = candidate.hit.num_tokens, candidate.token_budget
        end = min(candidate.num_tokens, start + max(budget, 1))
        reach = self._encoder.reach(candidate.request, start, end)
        if reach.end > start:
            return None
        self._encoder.start(reach)
        return "capacity"
