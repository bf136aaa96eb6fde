"""What the load report says about speed, measured step by step. Pure: time is an argument, in seconds of any one clock."""

import math

RATE_WINDOW_S = 5.0
"""Time constant of "over the last seconds"."""
_STEPS = 32
"""Steps over which speeds are averaged, exponentially."""
_LEAST_S = 1.0
"""And no shorter than that: of a small model's steps, a moment when the machine stands still would be all that is seen."""


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

    def observe(self, now: float, *, seconds: float, prefill_tokens: int, sampled_tokens: int) -> None:
        """Takes in a step that has ended at `now` after `seconds`.

        Args:
            now: The step's end.
            seconds: What it took.
            prefill_tokens: Tokens computed of rows that lacked more than one.
            sampled_tokens: Tokens sampled.
        """
        self._prompt.add(prefill_tokens, now)
        self._generation.add(sampled_tokens, now)
        keep = 1 - 1 / _STEPS
        if prefill_tokens:
            # A quotient of averages: a step with a short rest of a prompt says little and weighs little.
            self._prefill_tokens = keep * self._prefill_tokens + prefill_tokens
            self._prefill_seconds = keep * self._prefill_seconds + seconds
        elif sampled_tokens:
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

    def prompt_tokens_per_s(self, now: float) -> float:
        """Prompt tokens computed a second, of late."""
        return self._prompt.at(now)

    def generation_tokens_per_s(self, now: float) -> float:
        """Tokens sampled a second, of late."""
        return self._generation.at(now)
