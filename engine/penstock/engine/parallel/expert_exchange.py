"""How tokens meet experts on other ranks, and how the results come back.

    dispatch   every core's tokens and their choices, to all ranks          one gather
    compute    each rank: the choices that its own slots serve
    combine    of every rank, the results for a core's own tokens           one gather
               their sum by weight, in the order of the choices

The sum is taken where the token is, in the order of its choices and in float32: so it has the bits of one rank, wherever the
experts are and whichever copy of one has served.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from penstock.engine.models.layers.expert_ranks import ExpertLayer
from penstock.engine.models.layers.placement import Int64, Placement
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.expert_balancer import ExpertBalancer
from penstock.engine.parallel.expert_group import ExpertGroup
from penstock.engine.parallel.expert_mover import ExpertMover, moving_bytes
from penstock.engine.parallel.shared_comm import SharedComm
from penstock.engine.stats import ExpertStats
from penstock.kernels.cpu.build import BuildError
from penstock.kernels.ops import Ops, native_collectives

NEED: Final = "--enable-expert-parallel needs the compiled exchanges of ranks"


class ExpertExchange:
    """One rank's.

    Until `open`, steps are the rank's own: a choice of an expert elsewhere gives zeros. From then on all ranks begin each step
    together.

    Args:
        group: The rank's place.
        ops: Whose collectives are used, where they are compiled; ConfigError where none are.
    """

    def __init__(self, group: ExpertGroup, ops: Ops) -> None:
        try:
            collectives = ops.collectives or native_collectives(group.isa)
        except BuildError as error:
            raise GroupFailed(f"{NEED}: {error}") from error
        self._group = group
        ends = group.wires.sent_by(group.rank), group.wires.taken_by(group.rank)
        self._comm = SharedComm(group.memory, group.rank, collectives, group.timeout, *ends)
        self._layers: Sequence[ExpertLayer] = ()
        self._balancer: ExpertBalancer | None = None
        if group.moves is not None and group.eplb is not None:
            ends = group.move_wires.sent_by(group.rank), group.move_wires.taken_by(group.rank)
            moves = SharedComm(group.moves, group.rank, native_collectives(group.isa), group.timeout, *ends)
            self._balancer = ExpertBalancer(group.eplb, ExpertMover(moves))
        self.is_open = False
        self._tokens = np.zeros(group.cores, np.int64)

    @property
    def rank(self) -> int:
        """This process's."""
        return self._group.rank

    def placed(self, experts: int) -> Placement:
        """Where a layer's experts are to begin with."""
        eplb = self._group.eplb
        return Placement.linear(experts, self._group.world, 0 if eplb is None else eplb.num_redundant_experts)

    def adopt(self, layers: Sequence[ExpertLayer]) -> None:
        """The model's layers with experts are these, in the order of a step; all ranks come to it between the same two steps."""
        self._layers = layers
        if self._balancer is not None:
            self._balancer.adopt(layers)

    def moving_bytes(self) -> int:
        """Bytes that the rank needs for weights that move; ConfigError where they cannot."""
        layers = () if self._balancer is None else self._layers
        return max((moving_bytes(layer, self._group.rank) for layer in layers), default=0)

    def open(self) -> None:
        """From now on steps are those of all ranks."""
        self.is_open = True

    def stats(self) -> ExpertStats | None:
        """What experts have had to do, on all ranks; None: nobody has them counted."""
        return None if self._balancer is None else self._balancer.stats()

    def begin(self, tokens: int) -> bool:
        """Begins a step with so many tokens of this core, together with all ranks; says whether any core has tokens."""
        if not self.is_open:
            return tokens > 0
        balancer = self._balancer
        told = torch.tensor([tokens, 0 if balancer is None else balancer.num_ready]).view(torch.uint8)
        found = self._gather(told, np.full(self._group.world, len(told))).view(torch.int64).view(-1, 2).numpy()
        self._tokens = found[:: self._group.each, 0].copy()
        some = bool(self._tokens.any())
        if balancer is not None:
            balancer.begin_step(int(found[:, 1].min()), some=some)
        return some

    def serve(self) -> None:
        """Takes part in a step without tokens of its own: the other cores' tokens need this rank's experts."""
        for layer in self._layers:
            nothing = torch.empty(0, layer.hidden_size, dtype=layer.dtype)
            self.run(layer, nothing, torch.empty(0, layer.top_k, dtype=torch.int32), torch.empty(0, layer.top_k))

    def run(self, layer: ExpertLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A layer of experts.

        Args:
            layer: Its experts.
            hidden: [n, hidden] of this core's tokens.
            ids: [n, k], int32: the experts of each.
            weights: [n, k], float32.

        Returns:
            [n, hidden] in hidden's dtype: the whole sum, on every rank of the core.
        """
        if not self.is_open:
            return self._run_alone(layer, hidden, ids, weights)
        group, placement, choices = self._group, layer.placement, layer.top_k
        x, chosen = self._dispatched(hidden, ids)
        slots = placement.route(chosen, np.arange(len(chosen))).reshape(-1)
        ranks = placement.rank_of[slots]
        # A rank's results are in the order of the choices, so that those of one core's tokens follow one another.
        order = np.argsort(ranks, kind="stable")
        counts = np.bincount(ranks, minlength=group.world)
        if self._balancer is not None:
            self._balancer.count(layer, chosen, counts)
        ends = np.cumsum(counts)
        mine = order[ends[group.rank] - counts[group.rank] : ends[group.rank]]
        local = torch.from_numpy((slots[mine] - placement.starts[group.rank]).astype(np.int32))
        results = _rows(layer, x, mine // choices, local)
        first = int(self._tokens[: group.core].sum()) * choices
        last = first + len(hidden) * choices
        parts = np.split(order, ends[:-1])
        bounds = np.array([np.searchsorted(part, (first, last)) for part in parts]).T
        width = hidden.shape[1] * hidden.element_size()
        found = self._gather(results.view(-1).view(torch.uint8), counts * width, bounds * width)
        wanted = np.concatenate([part[low:high] for part, low, high in zip(parts, *bounds, strict=True)])
        places = np.empty(len(wanted), np.int64)
        places[wanted - first] = np.arange(len(wanted))
        rows = found.view(hidden.dtype).view(-1, hidden.shape[1])
        return layer.combine(rows, torch.from_numpy(places.reshape(-1, choices)), weights)

    def _dispatched(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Int64]:
        """All cores' tokens in the order of the cores, [m, hidden], and their experts, [m, k]."""
        group = self._group
        if group.cores == 1:  # its ranks have them all
            return hidden, ids.numpy().astype(np.int64)
        wide = hidden.shape[1] * hidden.element_size()
        row = torch.cat((hidden.view(torch.uint8), ids.contiguous().view(torch.uint8)), 1)
        # The ranks of a core have the same: the first one tells it.
        sizes = np.zeros(group.world, np.int64)
        sizes[:: group.each] = self._tokens * row.shape[1]
        both = self._gather(row.view(-1), sizes).view(-1, row.shape[1])
        x = both[:, :wide].contiguous().view(hidden.dtype)
        return x, both[:, wide:].contiguous().view(torch.int32).numpy().astype(np.int64)

    def _gather(self, data: torch.Tensor, sizes: Int64, bounds: Int64 | None = None) -> torch.Tensor:
        """Bytes of every rank, all or those within bounds [2, ranks]."""
        kept = np.stack((np.zeros_like(sizes), sizes)) if bounds is None else np.ascontiguousarray(bounds)
        return self._comm.gather_parts(data.contiguous(), np.ascontiguousarray(sizes), kept)

    def _run_alone(self, layer: ExpertLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As large a step as if every core had as many tokens, with the rank's own experts alone."""
        cores, (tokens, choices) = self._group.cores, ids.shape
        x = hidden.repeat(cores, 1) if cores > 1 else hidden
        local = layer.placement.local(self._group.rank)[ids.numpy().astype(np.int64)].reshape(-1)
        local = np.tile(local, cores)
        mine = np.flatnonzero(local >= 0)
        results = _rows(layer, x, mine // choices, torch.from_numpy(local[mine].astype(np.int32)))
        rows = torch.zeros(tokens * choices, hidden.shape[1], dtype=hidden.dtype)
        own = torch.from_numpy(mine[mine < tokens * choices])
        rows[own] = results[: len(own)]
        return layer.combine(rows, torch.arange(tokens * choices).view(tokens, choices), weights)


def _rows(layer: ExpertLayer, x: torch.Tensor, rows: Int64, slots: torch.Tensor) -> torch.Tensor:
    """Of these rows of x, the results of the rank's slots."""
    return layer.rows(x[torch.from_numpy(rows)], slots) if len(rows) else x[:0]
