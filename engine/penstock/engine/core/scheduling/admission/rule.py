"""Admission: may this request start now, and if not, why not.

One rule a file. Where a rule refuses for want of capacity, admission ends for this step, since those behind the first one would
take from it what it waits for. Any other reason is the candidate's own: it steps aside, and the next one is asked.
"""

from typing import Protocol

from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import CacheHit, KVCacheManager
from penstock.engine.core.scheduling.request import Request


class Candidate:
    """The first waiting request, and the step as far as it is planned.

    Args:
        request: It holds no row and no blocks.
        kv: Where its cached prefix is looked up, once, when the first rule asks for it.
        num_running: Requests that have a row.
        token_budget: Tokens left in this step.
        reserved_blocks: Blocks that running requests still need for tokens they already have.
        now: Unix time in seconds.
        computes_all: Whether it needs more of each token of its prompt than the cache supplies.
    """

    def __init__(
        self,
        request: Request,
        kv: KVCacheManager,
        *,
        num_running: int,
        token_budget: int,
        reserved_blocks: int,
        now: float,
        computes_all: bool = False,
    ) -> None:
        self.request = request
        self.now = now
        self.num_running = num_running
        self.token_budget = token_budget
        self.reserved_blocks = reserved_blocks
        self._kv = kv
        # A token that is not computed has no logprob.
        self.uses_cache = not (computes_all or request.sampling.prompt_logprobs is not None)
        self._hit: CacheHit | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.request.token_ids)

    @property
    def hit(self) -> CacheHit:
        """Its cached prefix; none where every token must be computed."""
        if self._hit is None:
            self._hit = self._kv.lookup(self.request, self.num_tokens if self.uses_cache else 1)
        return self._hit


class AdmissionRule(Protocol):
    """One reason to wait."""

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """Why the candidate must wait; None: this rule lets it start."""
        ...
