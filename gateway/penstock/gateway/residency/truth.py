"""What was predicted of a prompt's cached tokens against what the engine then found, by model; and what is likely to be wrong
where the two part."""

import logging
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from math import inf

import msgspec

from penstock.api.events import RequestFinished
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.residency.index import Knowledge

log = logging.getLogger(__name__)

KEPT = 16_384
"""Requests whose end is awaited at most; the oldest go first."""
BUCKETS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of the error, as a share of the prompt."""
TTFT_BUCKETS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0, 16.0)
"""Upper bounds of the time to the first token as a multiple of what was estimated."""
MEMORY = 0.95
"""How much of a replica's mean error stays with each request: about twenty requests count."""
ALARM, CALM = 0.25, 0.05
"""Mean error from which a replica is reported once, and below which it may be reported again."""
ENOUGH = 20
"""Requests of a replica before its mean says anything."""


class Prediction(msgspec.Struct, frozen=True):
    """What was known when a request was sent."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    """That the replica's cache would supply."""
    block_size: int
    exact: bool
    """The prompt was tokenised, not guessed."""
    ttft_s: float = 0.0
    """Time to the first token, as it was estimated; 0: it was not."""

    def times(self, event: RequestFinished) -> bool:
        """Whether the end of the request tells how long its first token took, where that had been estimated."""
        return self.exact and self.ttft_s > 0 and 0 < event.ttft_s < inf


class Tally:
    """The errors of one model."""

    def __init__(self) -> None:
        self.predicted = 0
        """Tokens."""
        self.found = 0
        """Tokens."""
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.error_sum = 0.0
        self.ttft_buckets = [0] * (len(TTFT_BUCKETS) + 1)
        self.ttft_sum = 0.0
        self.miscounted = 0
        """Prompts for which the engine counted other tokens than the picker."""


class _Record:
    """How well a replica is known."""

    def __init__(self) -> None:
        self.requests = 0
        self.error = 0.0
        self.miscounted = 0.0
        self.reported = False


class _Awaited:
    """The ends that one replica still owes under one request id."""

    __slots__ = ("ends", "prediction")

    def __init__(self, ends: int, prediction: Prediction | None) -> None:
        self.ends = ends
        self.prediction = prediction
        """None: an end does not say which request it belongs to."""


class Truth:
    """Awaits the ends of requests and compares."""

    def __init__(self) -> None:
        self._awaited: OrderedDict[tuple[ReplicaKey, str], _Awaited] = OrderedDict()
        self._records: defaultdict[ReplicaKey, _Record] = defaultdict(_Record)
        self.models: defaultdict[str, Tally] = defaultdict(Tally)

    def expect(self, key: ReplicaKey, request_id: str, prediction: Prediction | None, ends: int = 1) -> None:
        """A request was sent to `key`.

        Request ids are the clients', who may use one twice. Ends of requests that run at once under one id are not compared.

        Args:
            key: The replica.
            request_id: The request's id.
            prediction: What is predicted of it; None for several prompts or answers.
            ends: How many ends the replica will report for it: one per prompt and answer.
        """
        awaited = self._awaited.get((key, request_id))
        if awaited is None:
            self._awaited[key, request_id] = _Awaited(ends, prediction)
        else:
            awaited.ends += ends
            awaited.prediction = None
        while len(self._awaited) > KEPT:
            self._awaited.popitem(last=False)

    def awaits(self, key: ReplicaKey, request_id: str) -> bool:
        """Return whether this gateway sent a request of that id to `key` and has not heard of its end."""
        return (key, request_id) in self._awaited

    def finished(self, key: ReplicaKey, event: RequestFinished, knowledge: Knowledge) -> Prediction | None:
        """The end of a request; what had been predicted of it, where it was awaited and has run."""
        awaited = self._awaited.get((key, event.request_id))
        if awaited is None:
            return None
        awaited.ends -= 1
        if awaited.ends <= 0:
            del self._awaited[key, event.request_id]
        prediction = awaited.prediction
        if prediction is None or not event.output_tokens:
            return None
        error = abs(event.cached_tokens - prediction.cached_tokens) / max(event.prompt_tokens, 1)
        miscounted = prediction.exact and event.prompt_tokens != prediction.prompt_tokens
        tally = self.models[prediction.model]
        tally.predicted += prediction.cached_tokens
        tally.found += event.cached_tokens
        tally.error_sum += error
        tally.miscounted += miscounted
        tally.buckets[bisect_left(BUCKETS, error)] += 1
        if prediction.times(event):
            ratio = event.ttft_s / prediction.ttft_s
            tally.ttft_sum += ratio
            tally.ttft_buckets[bisect_left(TTFT_BUCKETS, ratio)] += 1
        self._judge(key, prediction.model, error, miscounted, knowledge)
        return prediction

    def drop(self, key: ReplicaKey) -> None:
        """`key` is gone, or a new process."""
        self._records.pop(key, None)

    def _judge(self, key: ReplicaKey, model: str, error: float, miscounted: bool, knowledge: Knowledge) -> None:
        record = self._records[key]
        record.requests += 1
        keep = MEMORY if record.requests > 1 else 0.0
        record.error = keep * record.error + (1 - keep) * error
        record.miscounted = keep * record.miscounted + (1 - keep) * miscounted
        worst = max(record.error, record.miscounted)
        if record.reported:
            record.reported = worst > CALM
        elif record.requests >= ENOUGH and worst > ALARM:
            record.reported = True
            log.warning(
                "%s at %s: cached tokens are predicted wrong by %.0f %% of the prompt: %s",
                *(model, key.uid, 100 * record.error, _cause(record, knowledge)),
            )


def _cause(record: _Record, knowledge: Knowledge) -> str:
    """What is most likely wrong."""
    if record.miscounted > ALARM:
        return "the engine counts other tokens: its tokenizer or chat template is not that of its prompt bundle"
    if knowledge is Knowledge.PREDICTED:
        return "it sends no events, and routing history does not show what it evicts or gets from elsewhere"
    if knowledge is not Knowledge.EXACT:
        return "its events were lost and could not be replayed"
    return "its events are late, or its cache evicts between pick and start, or tenants, salts or adapters are hashed otherwise"
