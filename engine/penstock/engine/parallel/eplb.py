"""Where copies of busy experts go, so that all ranks have about as much to do (EPLB: deepseek-ai/EPLB, 2025). Pure.

    1  groups of experts to nodes: the heaviest group into the lightest node that has room
    2  in each node, every spare slot to the expert whose copies have the most to do
    3  in each node, the heaviest slot to the lightest rank that has room

Where the groups do not divide among the nodes, all experts are one group on one node. An expert that stays on its rank keeps its
slot there, so that nothing of it moves.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine.models.layers.placement import Int64, Placement

Float64 = npt.NDArray[np.float64]

_NONE: Final = -1


def pack(weights: Float64, packs: int) -> Int64:
    """The pack of each item: the heaviest first, each into the lightest pack that is not full. All packs get equally many;
    ValueError where they cannot.

    Args:
        weights: [items].
        packs: How many.
    """
    if len(weights) % packs:
        raise ValueError(f"{len(weights)} items cannot be divided among {packs} packs")
    most, found = len(weights) // packs, np.full(len(weights), _NONE, np.int64)
    sums, counts = np.zeros(packs), np.zeros(packs, np.int64)
    for item in np.argsort(-weights, kind="stable"):
        pack_ = int(np.argmin(np.where(counts < most, sums, np.inf)))
        found[item] = pack_
        sums[pack_] += weights[item]
        counts[pack_] += 1
    return found


def replicate(weights: Float64, slots: int) -> Int64:
    """Copies of each expert, at least one: each spare slot to the expert whose copies have the most to do.

    Args:
        weights: [experts]: what each has to do.
        slots: How many there are; ValueError where that is fewer than experts.
    """
    if slots < len(weights):
        raise ValueError(f"{slots} slots are fewer than {len(weights)} experts")
    copies = np.ones(len(weights), np.int64)
    for _ in range(slots - len(weights)):
        copies[int(np.argmax(weights / copies))] += 1
    return copies


def rebalance(weights: Float64, slots: int, ranks: int, groups: int = 1, nodes: int = 1) -> Int64:
    """The expert of each slot of a layer, [slots]; those of a rank follow one another.

    Args:
        weights: [experts]: what each has to do.
        slots: On all ranks; a multiple of them.
        ranks: How many; a multiple of the nodes.
        groups: Of experts, from which a token's are chosen together.
        nodes: Machines.

    Raises:
        ValueError: Something does not divide.
    """
    if groups % nodes:
        groups = nodes = 1
    if slots % ranks or ranks % nodes or len(weights) % groups:
        raise ValueError(f"{slots} slots on {ranks} ranks of {nodes} nodes, {len(weights)} experts in {groups} groups")
    sums = weights.reshape(groups, -1).sum(1)
    node_of_group = pack(sums, nodes)
    of_group = np.arange(len(weights)).reshape(groups, -1)
    found = list[Int64]()
    for node in range(nodes):
        experts = of_group[node_of_group == node].reshape(-1)
        copies = replicate(weights[experts], slots // nodes)
        placed = np.repeat(experts, copies)
        loads = np.repeat(weights[experts] / copies, copies)
        rank_of = pack(loads, ranks // nodes)
        found += [np.sort(placed[rank_of == rank]) for rank in range(ranks // nodes)]
    return np.concatenate(found)


def keep_slots(old: Int64, new: Int64, ranks: int) -> Int64:
    """The same experts on each rank as in `new`, in the slots that `old` has them in, where it has.

    Args:
        old: [slots]: the expert of each now.
        new: [slots]: the experts that each rank is to have.
        ranks: How many.
    """
    each, found = len(old) // ranks, np.full(len(old), _NONE, np.int64)
    for start in range(0, len(old), each):
        waiting = deque(sorted(new[start : start + each].tolist()))
        for slot in range(start, start + each):
            if old[slot] in waiting:
                found[slot] = old[slot]
                waiting.remove(old[slot])
        for slot in range(start, start + each):
            if found[slot] == _NONE:
                found[slot] = waiting.popleft()
    return found


def loads_of_ranks(weights: Float64, placed: Int64, ranks: int) -> Float64:
    """What each rank has to do, [ranks], where the copies of an expert share its work equally."""
    copies = np.bincount(placed, minlength=len(weights))
    return (weights / np.maximum(copies, 1))[placed].reshape(ranks, -1).sum(1)


def balancedness(loads: Float64) -> float:
    """Mean of the ranks' loads over their greatest: 1 is even. 0 where there is no load."""
    return float(loads.mean() / loads.max()) if loads.size and loads.max() > 0 else 0.0


class Gift(NamedTuple):
    """The weights of a slot, for ranks that have none of its expert."""

    source: int
    takers: tuple[int, ...]
    """Slots of other ranks."""


class Moves(NamedTuple):
    """How the slots of a layer come to another placement. All of them are read before any is written."""

    within: Sequence[tuple[int, int]]
    """A slot, and another one of the same rank that is to have the same."""
    rounds: Sequence[Mapping[int, Gift]]
    """By round, what each rank gives that gives something."""


def moves(old: Placement, new: Int64) -> Moves:
    """What has to move. A rank with a copy of its own takes that one; what others give is distributed among those who can.

    Args:
        old: Whose weights are where now.
        new: [slots]: the expert that each slot is to have.
    """
    rank_of, within, gifts = old.rank_of, list[tuple[int, int]](), dict[int, list[int]]()
    given = np.zeros(len(old.starts) - 1, np.int64)
    for slot in np.flatnonzero(new != old.expert).tolist():
        expert, rank = int(new[slot]), int(rank_of[slot])
        holders = old.slots[expert, : old.copies[expert]].tolist()
        if own := [holder for holder in holders if rank_of[holder] == rank]:
            within.append((own[0], slot))
            continue
        source = min(holders, key=lambda holder: (holder not in gifts, given[rank_of[holder]], holder))
        if source not in gifts:
            given[rank_of[source]] += 1
        gifts.setdefault(source, []).append(slot)
    rounds = [dict[int, Gift]() for _ in range(int(given.max()))]
    given[:] = 0
    for source, takers in gifts.items():
        rank = int(rank_of[source])
        rounds[given[rank]][rank] = Gift(source, tuple(takers))
        given[rank] += 1
    return Moves(within, rounds)


def better_placement(loads: Float64, placed: Placement) -> Int64 | None:
    """The expert of each slot, [slots], where the busiest rank then has less to do; None: nothing is to be gained.

    Args:
        loads: [experts].
        placed: Whose weights are where now; all ranks have equally many slots.
    """
    old, ranks = placed.expert, len(placed.starts) - 1
    new = keep_slots(old, rebalance(loads, len(old), ranks), ranks)
    before, after = (loads_of_ranks(loads, of, ranks).max() for of in (old, new))
    return new if after < before else None


class LoadWindow:
    """Counts of the newest steps, and their sum.

    Args:
        rows: Of a step's counts.
        columns: The same.
        size: Steps.
    """

    def __init__(self, rows: int, columns: int, size: int) -> None:
        self._steps = np.zeros((size, rows, columns), np.int32)
        self._sum = np.zeros((rows, columns), np.int64)
        self._at = 0

    def add(self, counts: Int64) -> None:
        """Takes in a step, [rows, columns]; the oldest one is forgotten."""
        oldest = self._steps[self._at % len(self._steps)]
        self._sum += counts - oldest
        oldest[:] = counts
        self._at += 1

    def loads(self) -> Float64:
        """[rows, columns]."""
        return self._sum.astype(np.float64)


class LoadMeter:
    """What the experts have to do, as all ranks count it alike.

    Args:
        layers: With experts.
        experts: Of a layer.
        ranks: That have them.
        size: Steps that decide where experts are.
    """

    def __init__(self, layers: int, experts: int, ranks: int, size: int) -> None:
        self._experts, self._ranks = LoadWindow(layers, experts, size), LoadWindow(1, 2, size)
        self._chosen = np.zeros((layers, experts), np.int64)
        self._served = np.zeros((layers, ranks), np.int64)
        self.served = np.zeros(ranks, np.int64)
        """[ranks]: choices that each has computed since the start."""

    def count(self, layer: int, chosen: Int64, served: Int64) -> None:
        """Takes in a layer of a step.

        Args:
            layer: Its number among those with experts.
            chosen: Experts of the tokens of all cores.
            served: [ranks]: choices that each rank computes.
        """
        self._chosen[layer] += np.bincount(chosen.reshape(-1), minlength=self._chosen.shape[1])
        self._served[layer] += served

    def end_step(self) -> None:
        """A step is over."""
        self._experts.add(self._chosen)
        # Layers wait for their busiest rank, one after the other.
        self._ranks.add(np.array([[self._served.sum(), self._served.max(1).sum()]]))
        self.served += self._served.sum(0)
        self._chosen[:] = self._served[:] = 0

    def loads(self) -> Float64:
        """[layers, experts]: over the window."""
        return self._experts.loads()

    @property
    def balancedness(self) -> float:
        """Mean of the ranks' work over that of the busiest one in each layer and step of the window; 0 without work."""
        (total, greatest), *_ = self._ranks.loads().tolist()
        return total / len(self.served) / greatest if greatest else 0.0
