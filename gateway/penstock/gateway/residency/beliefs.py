"""What the picker believes of replicas' caches, where the beliefs come from, and how true they were: one door for those who send
requests somewhere and hear of their ends."""

from penstock.api.events import RequestFinished
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.request import RequestView
from penstock.gateway.residency.history import RoutingHistory
from penstock.gateway.residency.index import Knowledge, ResidencyIndex
from penstock.gateway.residency.truth import Prediction, Truth


class Beliefs:
    """The residency index with the two who write to it besides events: requests on their way, and their ends."""

    def __init__(self, index: ResidencyIndex) -> None:
        self._index = index
        self.history = RoutingHistory(index)
        self.truth = Truth()

    def routed(
        self,
        key: ReplicaKey,
        model: str,
        request: RequestView,
        resident_tokens: int,
        now: float,
        *,
        tells: bool,
        ttft_s: float = 0.0,
    ) -> None:
        """`request` goes to `key`.

        Args:
            key: The pick.
            model: Its `Model.id`.
            request: The request.
            resident_tokens: Prompt tokens that the pick's cache is believed to supply.
            now: Monotonic seconds.
            ttft_s: The time to its first token as it was estimated; 0: it was not.
            tells: The replica sends KV events; else what it caches follows from what it is sent.
        """
        prompts, block_size = request.space_of(key)
        if tells:
            for prompt in prompts:
                self._index.used(key, prompt.block_hashes)
        else:
            self.history.routed(key, [prompt.block_hashes for prompt in prompts], now)
        prediction, ends = None, len(prompts) * request.answers
        if ends == 1:
            exact = request.tokens_unknown is None
            prediction = Prediction(model, prompts[0].tokens, resident_tokens, block_size, exact, ttft_s)
        self.truth.expect(key, request.id, prediction, ends)

    def finished(self, key: ReplicaKey, event: RequestFinished) -> Prediction | None:
        """The end of a request, as the replica or its answer says it; what had been predicted of it, where it has run."""
        knowledge = self._index.knowledge(key)
        prediction = self.truth.finished(key, event, knowledge)
        if prediction is not None and knowledge is Knowledge.PREDICTED:
            size = prediction.block_size
            self.history.confirmed(key, prediction.cached_tokens // size, event.cached_tokens // size)
        return prediction

    def restarted(self, key: ReplicaKey) -> None:
        """`key` is a new process."""
        self._index.clear(key)
        self.truth.drop(key)

    def drop(self, key: ReplicaKey) -> None:
        """`key` is gone."""
        self._index.drop(key)
        self.history.drop(key)
        self.truth.drop(key)
