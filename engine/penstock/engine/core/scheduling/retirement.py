"""What becomes of a step's result: tokens, ends, drafts of the next step, and blocks that can be found from now on."""

from collections.abc import Sequence

import numpy as np

from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.core.plan import Bool, Int32, Int64, Pooled, StepPlan, StepResult, ints
from penstock.engine.core.row_table import RowTable, first_of
from penstock.engine.core.scheduling.in_flight import Flight, InFlight
from penstock.engine.core.scheduling.outputs import (
    RequestOutputs,
    Tokens,
    logprob_columns,
    offsets_of,
    pooled_columns,
    prompt_logprob_columns,
)
from penstock.engine.core.scheduling.request_book import RequestBook
from penstock.engine.core.scheduling.tenancy import Ending, Tenancy
from penstock.engine.core.vllm_events import BlockContents
from penstock.engine.messages import FinishReason
from penstock.prompt.hashing import BlockHasher


class Retirement:
    """Takes in results, oldest plan first.

    Args:
        kv: The cache.
        table: The rows' tokens and progress.
        tenancy: Who has them.
        in_flight: Plans that are under way, from which the one to retire has been taken.
        book: Ends requests.
        hasher: Names blocks.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        table: RowTable,
        tenancy: Tenancy,
        in_flight: InFlight,
        book: RequestBook,
        hasher: BlockHasher,
    ) -> None:
        self._kv = kv
        self._table = table
        self._tenancy = tenancy
        self._in_flight = in_flight
        self._book = book
        self._hasher = hasher
        self.contents: BlockContents | None = None
        """What blocks hold, for who publishes it; None: nobody does."""
        self.brought_drafts = False
        """Whether the last result did."""

    def take(self, flight: Flight, result: StepResult, now: float) -> RequestOutputs:
        """Takes in the result of a flight. What it holds for requests that have left since is ignored."""
        plan = flight.plan
        live = self._in_flight.is_live(flight)
        self._end_failed(result, plan, live)
        indexes = self._tenancy.indexes
        prompt_logprobs = prompt_logprob_columns(result.prompt_logprobs, live, indexes, plan.rows)
        pooled = pooled_columns(result.pooled, live, indexes, plan.rows)
        starts, ends = self._table.settle(plan, result.counts, live)
        tokens, endings = self._take_tokens(result, flight.rows, live, ends, now)
        # What follows a request's last token is nobody's, and is not to be found.
        self._commit(plan, live, starts, ends - (result.counts - tokens.counts) if endings else ends)
        self._take_drafts(result, flight.rows, tokens, endings)
        self._end_pooled(result.pooled, plan, live)
        for request, reason, stop_token_id, error, stop_reason in endings:
            self._book.finish(request, reason, stop_token_id=stop_token_id, error=error, stop_reason=stop_reason)
        return self._book.take_outputs(tokens, logprob_columns(result.logprobs, tokens.counts), prompt_logprobs, pooled)

    def fail(self, flight: Flight, error: str, code: str) -> RequestOutputs:
        """Ends the requests of a flight that came to nothing."""
        for row in ints(flight.rows[self._in_flight.is_live(flight)]):
            if request := self._tenancy.requests[row]:
                self._book.finish(request, FinishReason.ERROR, error=error, code=code)
        return self._book.take_outputs()

    def _end_failed(self, result: StepResult, plan: StepPlan, live: Bool) -> None:
        for at, error in result.failed.items():
            if live[at] and (request := self._tenancy.requests[int(plan.rows[at])]):
                live[at] = False
                # A request may also fail by what its client asked for, and then the prefix that it shares is as good as ever.
                if at in result.not_finite:
                    self._kv.forget(request.block_hashes)
                self._book.finish(request, FinishReason.ERROR, error=error)

    def _take_tokens(self, result: StepResult, rows: Int64, live: Bool, ends: Int32, now: float) -> tuple[Tokens, list[Ending]]:
        """Writes the tokens of requests that are still there, up to those that end them."""
        token_ids, counts = result.token_ids, result.counts
        given = live & (counts > 0)
        whole = np.count_nonzero(given) == len(given)
        if not whole:
            rows, token_ids, counts, ends = rows[given], token_ids[given], counts[given], ends[given]
        several = token_ids.shape[1] > 1
        firsts = ends - counts + 1 if several else ends
        self._table.write_tokens(rows, firsts, token_ids, counts)
        for request in self._tenancy.begun(rows, firsts):
            request.first_token_at = now
        kept, endings = self._tenancy.take(rows, firsts, token_ids, counts, self._table.token_ids)
        self._book.charge_outputs(rows, kept if several else None)
        by_plan_row = kept
        if not whole:
            by_plan_row = np.zeros(len(given), np.int32)
            by_plan_row[given] = kept
        return Tokens(self._tenancy.indexes[rows], offsets_of(kept, several), first_of(token_ids, kept), by_plan_row), endings

    def _take_drafts(self, result: StepResult, rows: Int64, tokens: Tokens, endings: Sequence[Ending]) -> None:
        """What comes next in rows whose requests go on: as the runner proposes, and as guides allow."""
        tenancy = self._tenancy
        self.brought_drafts = result.drafts is not None
        if result.drafts is not None or tenancy.has_proposed:
            self._propose(result.drafts, rows, tokens)
        if not tenancy.guides:
            return
        goes_on = tokens.counts > 0
        if endings:
            goes_on &= ~np.isin(rows, [ending.request.row for ending in endings])
        tenancy.guides.look_on(rows[goes_on], None if result.drafts is None else result.drafts[goes_on])

    def _propose(self, drafts: Int32 | None, rows: Int64, tokens: Tokens) -> None:
        """The runner's drafts, [r, K], or none, are those of the rows' next step."""
        if not self._in_flight and drafts is None:
            self._tenancy.propose(rows, 0)
            return
        goes_on = tokens.counts > 0
        # A row in flight has drafts by then that nobody has been told of.
        goes_on &= ~self._in_flight.holds(rows)
        self._tenancy.propose(rows[goes_on], 0 if drafts is None else (drafts[goes_on] >= 0).sum(axis=1))

    def _end_pooled(self, pooled: Pooled | None, plan: StepPlan, live: Bool) -> None:
        """Ends the requests whose embeddings are there."""
        for at in [] if pooled is None else ints(pooled.plan_rows):
            if live[at] and (request := self._tenancy.requests[int(plan.rows[at])]):
                self._book.finish(request, FinishReason.STOP)

    def _commit(self, plan: StepPlan, live: Bool, starts: Int32, ends: Int32) -> None:
        """Publishes the blocks that this step has filled, and gives back those that windows have left behind."""
        if not self._kv.needs_commits:
            return
        size = self._kv.block_size
        for at in (live & (ends // size > starts // size)).nonzero()[0].tolist():
            row, upto = int(plan.rows[at]), int(ends[at])
            request = self._tenancy.requests[row]
            assert request is not None
            if self._kv.enable_prefix_caching:
                tokens = self._table.token_ids[row, :upto].data
                request.extend_hashes(self._hasher, tokens)
                if self.contents is not None:
                    self.contents.add(request.block_hashes, tokens, self._kv.num_published(request), request.extra_keys)
            # An adapter is known by a name, under which another process may have another one.
            self._kv.commit(request, upto, lasting=request.adapter is None)
