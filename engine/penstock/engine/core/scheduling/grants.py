"""What running requests get of a step: decodes as one array operation, then chunks of prompts, and the blocks that both need."""

import numpy as np

from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.plan import Int64, ints
from penstock.engine.core.row_table import RowTable
from penstock.engine.core.scheduling.guides import most_forced
from penstock.engine.core.scheduling.images.encoder import Encoder
from penstock.engine.core.scheduling.in_flight import InFlight
from penstock.engine.core.scheduling.request import Request
from penstock.engine.core.scheduling.request_book import RequestBook
from penstock.engine.core.scheduling.step_builder import StepBuilder
from penstock.engine.core.scheduling.tenancy import Tenancy


class Grants:
    """Grants tokens to rows, and takes rows from the requests served last where blocks are short.

    Args:
        config: Limits of a step.
        kv: The cache.
        table: The rows' progress.
        tenancy: Who has them.
        in_flight: Plans that are under way.
        book: Preempts.
        encoder: Limits chunks to images whose embeddings can be there.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        table: RowTable,
        tenancy: Tenancy,
        in_flight: InFlight,
        book: RequestBook,
        encoder: Encoder,
    ) -> None:
        self._num_lookahead_tokens = config.num_lookahead_tokens
        self._stages = config.pipeline_stages
        self._kv = kv
        self._table = table
        self._tenancy = tenancy
        self._in_flight = in_flight
        self._book = book
        self._encoder = encoder

    def grant(self, step: StepBuilder) -> None:
        """Closes the gaps of running requests as far as the step's budget goes."""
        rows = self._tenancy.rows()
        known = self._table.num_tokens[rows]
        gaps = known - self._table.num_computed[rows]
        # A row at its limit ends when the tokens in flight are known: they need no step of their own.
        decodes, chunks = (gaps == 1) & (known < self._tenancy.limits[rows]), gaps > 1
        if with_images := self._encoder.rows:  # the last token that such a row lacks may be an image's
            held = np.isin(rows, with_images) & (gaps == 1)
            decodes, chunks = decodes & ~held, chunks | held
        if self._stages > 1:
            # Each stage is to have a plan: none takes more than its part of the requests, or those whose tokens are in flight.
            decodes &= ~self._in_flight.holds(rows)
            decodes &= np.cumsum(decodes) <= -(-len(rows) // self._stages)
        self._grant_decodes(step, rows[decodes])
        self._grant_chunks(step, rows[chunks])

    def _grant_decodes(self, step: StepBuilder, rows: Int64) -> None:
        """A token for each, its drafts, and a block where its blocks are all full."""
        if self._tenancy.has_proposed or self._tenancy.guides.forced:
            self._grant_drafts(step, rows)
        else:
            step.grant_decodes(rows)
        rows = step.decodes
        own = ends = self._table.num_tokens[rows]
        if step.num_drafts is not None:
            ends = own + step.num_drafts
        if self._num_lookahead_tokens:
            ends = ends + self._num_lookahead_tokens
        crossing = (ends > self._table.room[rows]).nonzero()[0]
        if not len(crossing):
            return
        if self._num_lookahead_tokens:
            ends = np.maximum(np.minimum(ends, self._table.token_ids.shape[1]), own)
        self._grow_decodes(step, ints(rows[crossing]), ints(own[crossing]), ints(ends[crossing]))

    def _grow_decodes(self, step: StepBuilder, rows: list[int], known: list[int], ends: list[int]) -> None:
        """Makes room up to `ends` for requests with so many tokens: at once where the pool has it, else one after the other."""
        requests = [request for row in rows if (request := self._tenancy.requests[row]) is not None]
        if (blocks := self._kv.grow(requests, ends)) is not None:
            step.appends.update(zip(rows, blocks, strict=True))
            return
        for request, own, end in zip(requests, known, ends, strict=True):
            if request.row >= 0:  # not preempted in this step
                self._grow(step, request, own, end - own)

    def _grant_drafts(self, step: StepBuilder, rows: Int64) -> None:
        """A token for each, and its drafts as far as it may still grow."""
        forced = self._tenancy.guides.forced
        if forced:
            # What is forced follows the last token of all, which a row in flight does not have yet.
            ready = np.array([row not in forced for row in ints(rows)], np.bool_)
            rows = rows[ready | ~self._in_flight.holds(rows)]
        if not forced and not self._tenancy.has_proposed:
            step.grant_decodes(rows)
            return
        wanted = self._tenancy.num_proposed[rows]
        if not forced and not np.count_nonzero(wanted):
            step.grant_decodes(rows)
            return
        room = most_forced(len(self._table.num_tokens))
        for at, row in enumerate(ints(rows) if forced else ()):
            if room and row in forced:
                step.draft_ids[row] = forced[row][:room]
                wanted[at] = len(step.draft_ids[row])
                room -= len(step.draft_ids[row])
        step.grant_decodes(rows, np.minimum(wanted, self._tenancy.limits[rows] - self._table.num_tokens[rows] - 1))

    def _grant_chunks(self, step: StepBuilder, rows: Int64) -> None:
        for row in ints(rows):
            request = self._tenancy.requests[row]
            if step.token_budget == 0:
                return
            if request is None:  # preempted in this step
                continue
            computed, known = int(self._table.num_computed[row]), int(self._table.num_tokens[row])
            end = computed + step.chunk(known - computed)
            reach = self._encoder.reach(request, computed, end) if request.images else None
            if reach is not None and (end := reach.end) == computed:
                self._encoder.start(reach)
                continue
            if self._grow(step, request, end):
                if reach is not None:
                    self._encoder.take(request, reach)
                step.grant_chunk(row, end - computed, samples=end == known)
                step.reserved_blocks += self._kv.blocks_for(known) - self._kv.blocks_for(end)

    def _grow(self, step: StepBuilder, request: Request, num_tokens: int, beyond: int = 0) -> bool:
        """Makes room for a running request's tokens, at the cost of those served after it; False: at its own. What is beyond,
        its drafts and those that a draft model will propose, is worth no other request's place."""
        blocks = self._kv.allocate(request, num_tokens, lookahead=beyond)
        if blocks is None and beyond:
            step.take_back_drafts(request.row)
            blocks = self._kv.allocate(request, num_tokens)
        while blocks is None:
            victim = self._tenancy.running[-1]
            step.take_back(victim.row)
            self._book.preempt(victim, step.now)
            if victim is request:
                return False
            blocks = self._kv.allocate(request, num_tokens)
        step.appends[request.row] = blocks
        return True
