"""How the requests of each model began, counted from the start of this process: what a canary is judged by."""

import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.api.fleet import LATENCY_EDGES_S, ModelOutcomes
from penstock.gateway.models.names import Names

BATCH = 256
"""Answers that are counted in one go: where each was counted by itself, most of that was the way to the counters."""
Answer = tuple[str, str, float | None, bool]
"""What `Outcomes.answered` takes."""


class Outcomes:
    """The counts by model id."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        """Differs in each process. Counts of two epochs cannot be compared."""
        self.listeners: list[Callable[[Sequence[Answer]], None]] = []
        """Who counts answers otherwise; what they have counted is complete after `settle`."""
        self._new: list[Answer] = []
        """What is not counted yet."""
        self._counts: dict[str, tuple[list[int], list[int]]] = {}
        """Requests and failures; first tokens by time."""

    def answered(self, model: str, code: str, seconds: float | None = None, *, streamed: bool = False) -> None:
        """One request for a model.

        Args:
            model: `Model.id`.
            code: The status that it got, or another word where it got none: a client that gives up may have waited in vain.
            seconds: How long a good answer took to begin.
            streamed: Whether that is the time to its first token.
        """
        self._new.append((model, code, seconds, streamed))
        if len(self._new) >= BATCH:
            self.settle()

    def settle(self) -> None:
        """Counts what was not counted yet."""
        new, self._new = self._new, []
        for (model, code), count in Counter([(model, code) for model, code, _, _ in new]).items():
            begun, _ = self._counts.setdefault(model, ([0, 0], [0] * (len(LATENCY_EDGES_S) + 1)))
            begun[0] += count
            if code.startswith("5") or not code.isdecimal():
                begun[1] += count
        for model, _, seconds, streamed in new:
            if streamed and seconds is not None:
                self._counts[model][1][bisect_left(LATENCY_EDGES_S, seconds)] += 1
        for told in self.listeners:
            told(new)

    def view(self, names: Names) -> list[ModelOutcomes]:
        """The models of the fleet that have had requests; forgets those that are gone."""
        self.settle()
        self._counts = {model: counts for model, counts in self._counts.items() if model in names.models}
        return [
            ModelOutcomes(
                model=model,
                canary_of=names.main_of(model),
                requests=requests,
                failures=failures,
                ttft_counts=list(times),
            )
            for model, ((requests, failures), times) in self._counts.items()
        ]
