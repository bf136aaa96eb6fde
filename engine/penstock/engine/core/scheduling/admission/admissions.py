"""Which waiting requests a step admits, and with how many tokens."""

from collections.abc import Sequence

import numpy as np

from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.core.plan import Admission
from penstock.engine.core.scheduling.admission.rule import AdmissionRule, Candidate
from penstock.engine.core.scheduling.images.encoder import Encoder
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.request_book import RequestBook
from penstock.engine.core.scheduling.step_builder import StepBuilder
from penstock.engine.core.scheduling.tenancy import Tenancy
from penstock.engine.core.scheduling.waiting_room import WaitingRoom


class Admissions:
    """Asks the rules about one waiting request after the other.

    Args:
        rules: Asked in this order.
        kv: The cache.
        tenancy: Who has the rows.
        waiting: Who waits.
        adapters: Where adapters are.
        book: Starts requests.
        encoder: Limits chunks to images whose embeddings can be there.
        computes_all: Whether every request needs more of each token of its prompt than the cache supplies.
    """

    def __init__(
        self,
        rules: Sequence[AdmissionRule],
        kv: KVCacheManager,
        tenancy: Tenancy,
        waiting: WaitingRoom,
        adapters: AdapterTable,
        book: RequestBook,
        encoder: Encoder,
        *,
        computes_all: bool,
    ) -> None:
        self._rules = rules
        self._kv = kv
        self._tenancy = tenancy
        self._waiting = waiting
        self._adapters = adapters
        self._book = book
        self._encoder = encoder
        self._computes_all = computes_all

    def admit(self, step: StepBuilder) -> None:
        """Admits requests in their order until one has to wait for room."""
        if self._adapters.begin(step.now):
            self._waiting.release_held(step.now)
        while self._waiting.is_ready:
            candidate = Candidate(
                self._waiting.peek(),
                self._kv,
                num_running=len(self._tenancy.running),
                token_budget=step.token_budget,
                reserved_blocks=step.reserved_blocks,
                now=step.now,
                computes_all=self._computes_all,
            )
            reason = self._why_not(candidate)
            if reason is None:
                self._start(step, candidate)
            elif reason == "capacity":
                candidate.request.wait_for(reason, step.now)
                break
            elif reason == "remote_kv":
                self._waiting.park(candidate.request, reason, step.now)
            elif candidate.request.adapter is not None and reason == "lora":
                self._waiting.hold(candidate.request, reason, step.now)
            else:
                self._waiting.set_aside(candidate.request, reason, step.now)
        self._waiting.restore()

    def _why_not(self, candidate: Candidate) -> WaitingReason | None:
        for rule in self._rules:
            if (reason := rule.refuses(candidate)) is not None:
                return reason
        return None

    def _start(self, step: StepBuilder, candidate: Candidate) -> None:
        """Gives the request a row, its cached prefix and its first chunk."""
        request, hit, known = candidate.request, candidate.hit, candidate.num_tokens
        end = hit.num_tokens + step.chunk(known - hit.num_tokens)
        reach = self._encoder.reach(request, hit.num_tokens, end) if request.images else None
        end = end if reach is None else reach.end
        blocks = self._kv.allocate(request, end, local=hit)
        assert blocks is not None, "the admission rule counted blocks that are not there"
        row = self._book.start(request, hit.num_tokens, step.now)
        if reach is not None:
            self._encoder.take(request, reach)
        slot = -1 if request.adapter is None else self._adapters.move_in(request.adapter, step.now)
        tokens = np.array(request.token_ids, np.int32)
        sampling, guided = request.sampling, request.guide is not None
        items = tuple(image.item for image in request.images)
        grids = tuple(image.grid for image in request.images if image.grid is not None)
        length = request.num_prompt_tokens
        step.admissions.append(Admission(row, tokens, length, hit.num_tokens, sampling, slot, guided, items, grids))
        step.appends[row] = blocks
        step.grant_chunk(row, end - hit.num_tokens, samples=end == known)
        step.reserved_blocks += self._kv.blocks_for(known) - self._kv.blocks_for(end)
