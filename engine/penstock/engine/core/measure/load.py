"""What the load report says about speed, measured step by step. Pure: time is an argument, in seconds of any one clock."""

import math

from penstock.engine.core.measure.copies import MOST_SHARE, CopyMeter, CopyPace
from penstock.engine.core.measure.prompt_cost import PromptCost

RATE_WINDOW_S = 5.0
"""Time constant of "over the last seconds"."""
_STEPS = 32
"""Steps over which speeds are averaged, exponentially."""
_LEAST_S = 1.0
"""And no shorter than that: of a small model's steps, a moment when the machine stands still would be all that is seen."""

_COPIES = 0.75
"""Of a step's time: where copies took more, the step may have waited for them, and says nothing of rows that decode."""


class Rate:
    """Events a second, averaged exponentially over `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._time = -math.inf

    def add(self, count: int, now: float) -> None:
        """Counts events at `now`."""
        self._rate = self.at(now) + count / RATE_WINDOW_S
        self._time = now

    def at(self, now: float) -> float:
        """The rate at `now`, which fades when nothing happens."""
        return self._rate * math.exp((self._time - now) / RATE_WINDOW_S) if self._rate else 0.0


class LoadMeter:
    """Moving averages over the steps of one engine."""

    def __init__(self) -> None:
        self._prompt = Rate()
        self._generation = Rate()
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0
        self._decode_steps = 0.0
        self._decode_seconds = 0.0
        self._copies = CopyMeter()
        self._prompt_cost = PromptCost()

    def observe(
        self,
        now: float,
        *,
        seconds: float,
        prefill_tokens: int,
        sampled_tokens: int,
        prefill_pairs: float = 0.0,
        stored_s: float = 0.0,
        loaded_s: float = 0.0,
    ) -> None:
        """Takes in a step that has ended at `now` after `seconds`.

        Args:
            now: The step's end.
            seconds: What it took.
            prefill_tokens: Tokens computed of rows that lacked more than one.
            sampled_tokens: Tokens sampled.
            prefill_pairs: Of these tokens and those that they attend to.
            stored_s: Seconds that stores of pages took beside it.
            loaded_s: Seconds that loads of pages took beside it.
        """
        self._prompt.add(prefill_tokens, now)
        self._generation.add(sampled_tokens, now)
        keep = 1 - 1 / _STEPS
        if prefill_tokens:
            # A quotient of averages: a step with a short rest of a prompt says little and weighs little.
            self._prefill_tokens = keep * self._prefill_tokens + prefill_tokens
            self._prefill_seconds = keep * self._prefill_seconds + seconds
            self._prompt_cost.observe(prefill_tokens, prefill_pairs, seconds)
        elif sampled_tokens:
            self._copies.observe(seconds, loaded_s)
            if max(stored_s, loaded_s) > _COPIES * seconds:  # a step that has waited for copies
                return
            keep = 1 - min(1 / _STEPS, seconds / _LEAST_S)
            self._decode_steps = keep * self._decode_steps + 1
            self._decode_seconds = keep * self._decode_seconds + seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed; 0 before the first prefill."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step that only decodes; 0 before the first one."""
        return self._decode_seconds / self._decode_steps if self._decode_steps else 0.0

    def step_s(self, prefill_tokens: int, decodes: int) -> float:
        """Seconds that a step takes with so many tokens of prompts and rows that decode; 0: unknown, or it has neither."""
        if (prefill_tokens and not self.prefill_tokens_per_s) or (decodes and not self.decode_step_s):
            return 0.0
        chunks_s = prefill_tokens / self.prefill_tokens_per_s if prefill_tokens else 0.0
        return chunks_s + (self.decode_step_s if decodes else 0.0)

    def pace(self, prefill_tokens: int, decodes: int) -> CopyPace:
        """Return how much may be copied beside such steps: those who decode shall hardly notice."""
        return CopyPace(self.step_s(prefill_tokens, decodes), self._copies.share if decodes else MOST_SHARE)

    def saved_s(self, start: int, tokens: int, rest: int) -> float | None:
        """Return the seconds that a request saves if it need not compute some tokens of its prompt; None: unknown.

        The rest costs a step at least, and no step is shorter than one that only decodes: the first tokens cost little.

        Args:
            start: Tokens before those.
            tokens: That need not be computed.
            rest: Tokens behind those, which are computed in any case.
        """
        whole = self._prompt_cost.seconds(start, tokens + rest)
        behind = self._prompt_cost.seconds(start + tokens, rest)
        if whole is None or behind is None:
            return None
        return max(whole, self.decode_step_s) - max(behind, self.decode_step_s)

    def prompt_tokens_per_s(self, now: float) -> float:
        """Prompt tokens computed a second, of late."""
        return self._prompt.at(now)

    def generation_tokens_per_s(self, now: float) -> float:
        """Tokens sampled a second, of late."""
        return self._generation.at(now)
