"""Which graph a step runs with, if any. Pure: it knows what has been captured, and captures nothing."""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from penstock.engine.config import CudagraphMode
from penstock.engine.runner.device.graphs.descriptor import BatchDescriptor, GraphMode
from penstock.engine.runner.device.graphs.sizes import PaddedSizes


class Batch(NamedTuple):
    """A step before it is padded."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int | None
    """New tokens of each request; None where they differ."""
    has_lora: bool = False
    variant: Hashable = None
    """Variant of a full graph, as in `BatchDescriptor`."""
    shares: bool = False
    """Whether it pays to read a prefix of all requests apart."""


class Dispatch(NamedTuple):
    """A decision, and why no better one: the label `reason` of the steps' counter."""

    mode: GraphMode
    descriptor: BatchDescriptor
    """With mode NONE the batch as it is."""
    reason: str


# Why a step has the mode that it has.
UNIFORM = "uniform"
SHARED_PREFIX = "shared_prefix"
"""Uniform, and the requests' common prefix is read once."""
MIXED = "mixed"
NO_FULL_GRAPH = "no_full_graph"
"""Uniform, but there is no full graph for it; pieces do."""
DISABLED = "disabled"
PROFILING = "profiling"
TOO_LARGE = "too_large"
"""Beyond the largest size."""
NOT_CAPTURED = "not_captured"
"""A graph that is still to come, or whose capture failed."""

FEW_REQUESTS = (16, 64)
"""Requests at most of mixed FULL graphs beside those for as many as their tokens can be: attention divides the device among the
requests that it is launched for, and the fewer they are, the more programs share the keys of each."""


class GraphDispatcher:
    """One engine's.

    Args:
        mode: As the attention backend allows it.
        capture_sizes: What graphs are to be captured for, in tokens, or in requests where all have equally many tokens.
        max_num_seqs: Requests of a step at most.
        query_lens: New tokens of each request in steps of a variant that has uniform steps alone: 1 + K where K drafts are
            verified. The uniform steps of other variants have one.
        served_by: For each variant of a step the variants whose full graphs serve it, the best first.
    """

    def __init__(
        self,
        mode: CudagraphMode,
        capture_sizes: Iterable[int],
        max_num_seqs: int,
        query_lens: Mapping[Hashable, int] | None = None,
        served_by: Mapping[Hashable, Sequence[Hashable]] | None = None,
    ) -> None:
        self.mode: CudagraphMode = mode
        self.full_keys: set[BatchDescriptor] = set()
        self.piecewise_keys: set[BatchDescriptor] = set()
        self._profiling = False
        self._sizes, self._max_num_seqs, self._query_lens = sorted(set(capture_sizes)), max_num_seqs, query_lens or {}
        self._served_by: Mapping[Hashable, Sequence[Hashable]] = served_by or {None: (None,)}
        self._full_tables: dict[tuple[int, bool, Hashable, bool], PaddedSizes] = {}
        self._mixed: dict[tuple[bool, Hashable], list[BatchDescriptor]] = {}
        """By adapters and variant, in the order of tokens, then requests."""
        self._piecewise_tables: dict[bool, PaddedSizes] = {}
        self._found: dict[Batch, Dispatch] = {}
        """Decisions for uniform steps, since graphs were last added: few differ, and most steps are of them."""

    # --- what there may be ---

    def full_candidates(self, has_lora: bool, variant: Hashable = None) -> list[BatchDescriptor]:
        """The FULL graphs that the mode asks for, largest first."""
        if self.mode not in ("FULL", "FULL_AND_PIECEWISE"):
            return []
        length = self._query_lens.get(variant, 1)
        # Of several tokens a request, too, a step has no more of them than the largest size.
        most = min(self._max_num_seqs, max(self._sizes, default=0) // length)
        requests = sorted({min(size, most) for size in self._sizes} - {0}, reverse=True)
        found = [BatchDescriptor(n * length, n, length, has_lora, variant) for n in requests]
        if self.mode == "FULL" and variant not in self._query_lens:
            found += [self._of_mixed(size, self._max_num_seqs, has_lora, variant) for size in reversed(self._sizes)]
        return found

    def few_candidates(self, has_lora: bool, variant: Hashable) -> list[BatchDescriptor]:
        """Those of mixed steps with few requests for their tokens, largest first."""
        if self.mode != "FULL":
            return []
        limits = [(size, few) for size in reversed(self._sizes) for few in FEW_REQUESTS if few < min(size, self._max_num_seqs)]
        return [self._of_mixed(size, few, has_lora, variant) for size, few in limits]

    def sharing_candidates(self, has_lora: bool, variant: Hashable) -> list[BatchDescriptor]:
        """Those of several requests with one token each, in the form that reads a prefix of all apart."""
        found = self.full_candidates(has_lora, variant)
        return [replace(key, shares=True) for key in found if key.uniform_query_len == 1 and key.num_reqs != 1]

    def most_tokens(self, variant: Hashable) -> int:
        """Of a step that runs from a FULL graph of this variant, once all are captured."""
        return max((key.num_tokens for key in self.full_candidates(has_lora=False, variant=variant)), default=0)

    def piecewise_candidates(self, has_lora: bool) -> list[BatchDescriptor]:
        """The PIECEWISE graphs that the mode asks for, largest first."""
        if self.mode not in ("PIECEWISE", "FULL_AND_PIECEWISE"):
            return []
        return [BatchDescriptor(size, None, None, has_lora) for size in reversed(self._sizes)]

    def add(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """A graph has been captured; from now on it is used."""
        keys = self.full_keys if mode is GraphMode.FULL else self.piecewise_keys
        keys.add(key)
        self._rebuild()

    def clear(self) -> None:
        """All graphs are gone."""
        self.full_keys, self.piecewise_keys = set(), set()
        self._rebuild()

    # --- a step ---

    @contextmanager
    def profile(self) -> Iterator[None]:
        """Within it nothing runs in a graph: what is measured is the step itself."""
        self._profiling = True
        try:
            yield
        finally:
            self._profiling = False

    def dispatch(self, batch: Batch) -> Dispatch:
        """FULL where the exact key exists, else PIECEWISE, else NONE with the batch's own numbers. Without a graph of its own, a
        batch that has no adapters takes one that adds them. A shared prefix is read apart where there is a FULL graph for it."""
        if (reason := self._why_none()) is not None:
            return self._none(batch, reason)
        if (found := self._found.get(batch)) is None:
            found = self._decide(batch)
            if batch.uniform_query_len is not None:
                self._found[batch] = found
        return found

    def _decide(self, batch: Batch) -> Dispatch:
        # A graph that adds adapters adds none to tokens that have none.
        kinds = [batch] if batch.has_lora else [batch, batch._replace(has_lora=True)]
        for kind in [*kinds, *(kind._replace(shares=False) for kind in kinds if kind.shares)]:
            if (full := self._full(kind)) is not None:
                return Dispatch(GraphMode.FULL, full, SHARED_PREFIX if full.shares else UNIFORM if full.uniform else MIXED)
        for kind in kinds:
            table = self._piecewise_tables.get(kind.has_lora)
            if table is not None and (padded := table.padded(batch.num_tokens)) is not None:
                key = BatchDescriptor(padded, None, None, kind.has_lora)
                return Dispatch(GraphMode.PIECEWISE, key, MIXED if batch.uniform_query_len is None else NO_FULL_GRAPH)
        return self._none(batch, self._why_missed(batch))

    def _full(self, batch: Batch) -> BatchDescriptor | None:
        """The smallest that serves the batch, and of those the one with the least to do."""
        serving = (self._next_full(batch, variant) for variant in self._served_by.get(batch.variant, ()))
        return min((key for key in serving if key is not None), key=_size, default=None)

    def _next_full(self, batch: Batch, variant: Hashable) -> BatchDescriptor | None:
        length, has_lora, shares = batch.uniform_query_len, batch.has_lora, batch.shares
        if length is not None and (table := self._full_tables.get((length, has_lora, variant, shares))) is not None:
            padded = table.padded(batch.num_reqs)
            if padded is not None:
                return BatchDescriptor(padded * length, padded, length, has_lora, variant, shares)
        mixed = [] if shares else self._mixed.get((has_lora, variant), [])
        first = bisect_left(mixed, (batch.num_tokens, 0), key=_size)
        return next((key for key in mixed[first:] if _size(key)[1] >= batch.num_reqs), None)

    def _of_mixed(self, num_tokens: int, most: int, has_lora: bool, variant: Hashable) -> BatchDescriptor:
        return BatchDescriptor(num_tokens, min(num_tokens, most), None, has_lora, variant)

    def _none(self, batch: Batch, reason: str) -> Dispatch:
        own = BatchDescriptor(batch.num_tokens, batch.num_reqs, batch.uniform_query_len, batch.has_lora, batch.variant)
        return Dispatch(GraphMode.NONE, own, reason)

    def _why_none(self) -> str | None:
        if self.mode == "NONE":
            return DISABLED
        return PROFILING if self._profiling else None

    def _why_missed(self, batch: Batch) -> str:
        by_requests = batch.uniform_query_len == 1 and self.mode != "PIECEWISE"
        size = min(batch.num_tokens, batch.num_reqs if by_requests else batch.num_tokens)
        return TOO_LARGE if not self._sizes or size > self._sizes[-1] else NOT_CAPTURED

    def _rebuild(self) -> None:
        full: dict[tuple[int, bool, Hashable, bool], list[int]] = {}
        self._mixed = {}
        for key in sorted(self.full_keys, key=_size):
            if key.uniform_query_len is None:
                self._mixed.setdefault((key.has_lora, key.variant), []).append(key)
            else:
                full.setdefault((key.uniform_query_len, key.has_lora, key.variant, key.shares), []).append(_size(key)[1])
        pieces: dict[bool, list[int]] = {}
        for key in self.piecewise_keys:
            pieces.setdefault(key.has_lora, []).append(key.num_tokens)
        self._found.clear()
        self._full_tables = {of: PaddedSizes(sizes) for of, sizes in full.items()}
        self._piecewise_tables = {of: PaddedSizes(sizes) for of, sizes in pieces.items()}


def _size(full: BatchDescriptor) -> tuple[int, int]:
    """Tokens and requests of a full graph."""
    assert full.num_reqs is not None
    return full.num_tokens, full.num_reqs
