"""How the requests of each model began, counted from the start of this process: what a canary is judged by."""

import secrets
from bisect import bisect_left

from penstock.api.fleet import LATENCY_EDGES_S, ModelOutcomes
from penstock.gateway.models.names import Names


class Outcomes:
    """The counts by model id."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        """Differs in each process. Counts of two epochs cannot be compared."""
        self._counts: dict[str, tuple[list[int], list[int]]] = {}
        """Requests and failures; first tokens by time."""

    def answered(self, model: str, code: str, ttft_s: float | None = None) -> None:
        """One request for a model.

        Args:
            model: `Model.id`.
            code: The status that it got, or another word where it got none: a client that gives up may have waited in vain.
            ttft_s: Time to the first token, where the answer shows it.
        """
        known = self._counts.get(model)
        if known is None:
            known = self._counts[model] = [0, 0], [0] * (len(LATENCY_EDGES_S) + 1)
        (begun, times) = known
        begun[0] += 1
        begun[1] += code.startswith("5") or not code.isdecimal()
        if ttft_s is not None:
            times[bisect_left(LATENCY_EDGES_S, ttft_s)] += 1

    def view(self, names: Names) -> list[ModelOutcomes]:
        """The models of the fleet that have had requests; forgets those that are gone."""
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
