"""Which request has which row, and when it ends: the scheduler's own columns beside the row table."""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from penstock.engine.core.plan import Bool, Int32, Int64, ints
from penstock.engine.core.scheduling.guides import Guides
from penstock.engine.core.scheduling.repetition import RepetitionGuard
from penstock.engine.core.scheduling.request import Request, RequestStatus, order
from penstock.engine.messages import GRAMMAR_OPEN, FinishReason

NOBODY = 0
_NO_TOKEN = -2
"""In place of a stop token that a request does not have: -1 pads the tokens that rows give."""


class Ending(NamedTuple):
    """A token has ended a request."""

    request: Request
    reason: FinishReason
    stop_token_id: int | None = None
    """The token, where it is the reason."""
    error: str | None = None
    """What has failed, where that is the reason."""
    stop_reason: str | None = None
    """Details of the reason, for the client."""


class Tenancy:
    """Running requests, and columns by row.

    Args:
        max_num_seqs: Rows.
        max_model_len: Tokens of a request at most.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.running: list[Request] = []
        """Running requests in the order in which they are served."""
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.tenancies: Int64 = np.full(max_num_seqs, NOBODY, np.int64)
        """[rows]: a number for each stay of a request in a row. A step in flight with another number was planned for a request
        that has left since."""
        self.indexes: Int64 = np.full(max_num_seqs, -1, np.int64)
        """[rows]: the requests' names."""
        self.num_known: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens whose ids are known here; behind the row table's `num_tokens` by those being sampled."""
        self.num_prompt: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens of the prompt, which is where the first output token stands."""
        self.limits: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens at which the request ends. Always more than its prompt."""
        self.num_proposed: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: drafts at most that the runner has for the row's next step."""
        self.has_proposed = False
        """Whether it has any, which costs less to look up."""
        self.guides = Guides(max_num_seqs)
        self.slots: Int64 = np.zeros(max_num_seqs, np.int64)
        """[rows]: whose the request is, as `TokenCounters` numbers tenants."""
        # Rows are the second axis, and gathered by `take`: a reduction over the first one is several times faster.
        self._stop_ids: Int32 = np.full((4, max_num_seqs), _NO_TOKEN, np.int32)
        self._repetition = RepetitionGuard(max_num_seqs)
        self._rows: Int64 | None = None
        self._last_tenancy = NOBODY

    def rows(self) -> Int64:
        """[n]: rows of running requests in the order in which they are served."""
        if self._rows is None:
            self._rows = np.fromiter((request.row for request in self.running), np.int64, len(self.running))
        return self._rows

    def move_in(self, request: Request, slot: int) -> int:
        """Gives the request a free row; `slot` is its tenant's number."""
        row = self.free_rows.pop()
        self._last_tenancy += 1
        request.row, request.status = row, RequestStatus.RUNNING
        self.requests[row] = request
        self.tenancies[row] = self._last_tenancy
        self.indexes[row] = request.index
        self.slots[row] = slot
        self.num_known[row] = len(request.token_ids)
        self.num_proposed[row] = 0
        self.guides.move_in(row, request.guide)
        self.num_prompt[row] = request.num_prompt_tokens
        limit = min(request.num_prompt_tokens + request.sampling.max_tokens, self._max_model_len)
        # A prompt that is embedded may be as long as the context.
        self.limits[row] = max(limit, request.num_prompt_tokens + 1)
        self._set_stop_ids(row, request.sampling.stop_token_ids)
        self._repetition.move_in(row, request.sampling, request.token_ids, request.num_prompt_tokens)
        insort(self.running, request, key=order)
        self._rows = None
        return row

    def propose(self, rows: Int64 | Int32, counts: Int32 | int) -> None:
        """Takes in how many drafts the next step may verify of each of these rows, [m]."""
        self.num_proposed[rows] = counts
        self.has_proposed = np.count_nonzero(self.num_proposed) > 0

    def move_out(self, request: Request) -> None:
        """Frees the request's row."""
        row, request.row = request.row, -1
        self.requests[row] = None
        self.tenancies[row] = NOBODY
        self.indexes[row] = -1
        self.guides.move_out(row)
        self.free_rows.append(row)
        del self.running[bisect_left(self.running, request.key, key=order)]
        self._rows = None

    def begun(self, rows: Int64, positions: Int32) -> list[Request]:
        """Requests among `rows` [m] whose newest tokens, at `positions` [m], are their first."""
        first = [self.requests[row] for row in ints(rows[positions == self.num_prompt[rows]])]
        return [request for request in first if request is not None]

    def take(
        self, rows: Int64, firsts: Int32, token_ids: Int32, counts: Int32, all_token_ids: Int32
    ) -> tuple[Int32, list[Ending]]:
        """Takes in new tokens, up to the first of each row that ends its request.

        Args:
            rows: [m].
            firsts: [m]: positions of the rows' first new tokens.
            token_ids: [m, w]: the tokens.
            counts: [m]: how many of them count, at least 1 each.
            all_token_ids: [rows, max_model_len]: the row table's, the new ones included.

        Returns:
            [m], how many tokens of each row are taken; and the requests that end.
        """
        kept, found = counts, list[Ending]()
        if token_ids.shape[1] > 1 and not self._may_end(rows, firsts, token_ids, counts):
            for at, (count, error) in (self.guides.advance_whole(rows, token_ids, counts) if self.guides else {}).items():
                found.append(self._guided_end(int(rows[at]), error))
                if kept is counts:
                    kept = counts.copy()
                kept[at] = count
            self.num_known[rows] = firsts + kept
            return kept, found
        for column in range(token_ids.shape[1]):
            if column == 0:
                of, at, positions, tokens = None, rows, firsts, token_ids[:, 0]
            else:
                of = (kept > column).nonzero()[0]
                if not len(of):
                    break
                at, positions, tokens = rows[of], firsts[of] + column, token_ids[of, column]
            self.num_known[at] = positions + 1
            for index, ending in self._endings(at, positions, tokens, all_token_ids):
                found.append(ending)
                if kept is counts:
                    kept = counts.copy()
                kept[index if of is None else of[index]] = column + 1
        return kept, found

    def _may_end(self, rows: Int64, firsts: Int32, token_ids: Int32, counts: Int32) -> bool:
        """Whether one of several tokens of a row may end its request, its guide aside; arguments as of `take`. In most steps none
        does, and that takes far less to see than to ask it of one token after the other."""
        if self._repetition.guards(rows) or np.count_nonzero(firsts + counts >= self.limits[rows]):
            return True
        return bool(np.count_nonzero(self._stop_ids.take(rows, axis=1)[:, :, None] == token_ids))

    def _endings(self, rows: Int64, positions: Int32, tokens: Int32, all_token_ids: Int32) -> list[tuple[int, Ending]]:
        """Return which of the rows these tokens end."""
        stopped: Bool = np.logical_or.reduce(self._stop_ids.take(rows, axis=1) == tokens, axis=0)
        capped: Bool = positions + 1 >= self.limits[rows]
        repeats = self._repetition.trips(rows, positions, all_token_ids)
        ended = stopped | capped | repeats
        guided: dict[int, str | None] = {}
        if self.guides:
            guided = self.guides.advance(rows, tokens, stopped)
            ended[list(guided)] = True
        found: list[tuple[int, Ending]] = []
        for at in ended.nonzero()[0].tolist():
            row = int(rows[at])
            request = self.requests[row]
            assert request is not None
            if stopped[at]:
                ending = Ending(request, FinishReason.STOP, int(tokens[at]))
            elif at in guided:
                ending = self._guided_end(row, guided[at])
            else:
                reason = FinishReason.LENGTH if capped[at] else FinishReason.REPETITION
                ending = Ending(request, reason, stop_reason=GRAMMAR_OPEN if self.guides.is_open(row) else None)
            found.append((at, ending))
        return found

    def _guided_end(self, row: int, error: str | None) -> Ending:
        request = self.requests[row]
        assert request is not None
        return Ending(request, FinishReason.STOP if error is None else FinishReason.ERROR, error=error)

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - len(self._stop_ids)
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, missing), (0, 0)), constant_values=_NO_TOKEN)
        self._stop_ids[:, row] = _NO_TOKEN
        self._stop_ids[: len(stop_ids), row] = stop_ids
