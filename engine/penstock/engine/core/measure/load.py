"""What the load report says about speed, measured step by step. Pure: time is an argument, in seconds of any one clock."""

import math
from typing import Final, NamedTuple

from penstock.engine.core.measure.prompt_cost import PromptCost

RATE_WINDOW_S = 5.0
"""Time constant of "over the last seconds"."""
_STEPS = 32
"""Steps over which speeds are averaged, exponentially."""
_LEAST_S = 1.0
"""And no shorter than that: of a small model's steps, a moment when the machine stands still would be all that is seen."""

_SLOWER: Final = 0.02
"""By how much copies of pages may lengthen the steps of those who decode, on average."""
_SHARE: Final = 0.5
"""Of the time of a step that such copies take at most: its rows shall not wait for them."""
_BEFORE: Final = 4
"""Steps over which the time of those without copies is averaged: it grows with the answers, and changes with who decodes."""
_DOUBT: Final = 0.25
"""Of a step: copies that long are taken to have held it up by as much, before any has been timed."""


class CopyPace(NamedTuple):
    """How much may be copied beside steps."""

    step_s: float = 0.0
    """Seconds that the step takes; 0: unknown, or nobody is in it. All that is due may go with it then."""
    share: float = 1.0
    """Of the time of such steps that copies may take, on average."""


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
        self._plain_s = 0.0
        self._copied = self._held_up = _DOUBT
        self.prompt_cost = PromptCost()

    def observe(
        self,
        now: float,
        *,
        seconds: float,
        prefill_tokens: int,
        sampled_tokens: int,
        prefill_pairs: float = 0.0,
        copied_s: float = 0.0,
    ) -> None:
        """Takes in a step that has ended at `now` after `seconds`.

        Args:
            now: The step's end.
            seconds: What it took.
            prefill_tokens: Tokens computed of rows that lacked more than one.
            sampled_tokens: Tokens sampled.
            prefill_pairs: Of these tokens and those that they attend to.
            copied_s: Seconds that loads of pages took beside it.
        """
        self._prompt.add(prefill_tokens, now)
        self._generation.add(sampled_tokens, now)
        keep = 1 - 1 / _STEPS
        if prefill_tokens:
            # A quotient of averages: a step with a short rest of a prompt says little and weighs little.
            self._prefill_tokens = keep * self._prefill_tokens + prefill_tokens
            self._prefill_seconds = keep * self._prefill_seconds + seconds
            self.prompt_cost.observe(prefill_tokens, prefill_pairs, seconds)
        elif sampled_tokens:
            self._observe_copies(seconds, copied_s)
            keep = 1 - min(1 / _STEPS, seconds / _LEAST_S)
            self._decode_steps = keep * self._decode_steps + 1
            self._decode_seconds = keep * self._decode_seconds + seconds

    def _observe_copies(self, seconds: float, copied_s: float) -> None:
        """Learns by how much copies hold up those who decode: from how much longer a step takes than those right before it."""
        if not copied_s:
            self._plain_s += (seconds - self._plain_s) / (_BEFORE if self._plain_s else 1)
        elif self._plain_s:
            keep = 1 - 1 / _STEPS
            # By no more than they took: what is beyond that has other reasons, as has what is below.
            held_up_s = min(max(seconds - self._plain_s, -copied_s), copied_s)
            self._copied = keep * self._copied + copied_s / self._plain_s
            self._held_up = keep * self._held_up + held_up_s / self._plain_s

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
        """Return how much may be copied beside such steps.

        Those who decode shall hardly notice. Where a core is free, copies hold up nobody; else they do by all that they take.
        """
        share = _SHARE
        if decodes and self._held_up > 0:
            share = min(share, _SLOWER * self._copied / self._held_up)
        return CopyPace(self.step_s(prefill_tokens, decodes), share)

    def prompt_tokens_per_s(self, now: float) -> float:
        """Prompt tokens computed a second, of late."""
        return self._prompt.at(now)

    def generation_tokens_per_s(self, now: float) -> float:
        """Tokens sampled a second, of late."""
        return self._generation.at(now)
