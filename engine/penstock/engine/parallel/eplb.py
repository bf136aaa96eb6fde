"""Where copies of busy experts go, so that all ranks have about as much to do (EPLB: deepseek-ai/EPLB, 2025). Pure.

    1  groups of experts to nodes: the heaviest group into the lightest node that has room
    2  in each node, every spare slot to the expert whose copies have the most to do
    3  in each node, the heaviest slot to the lightest rank that has room

Where the groups do not divide among the nodes, all experts are one group on one node. An expert that stays on its rank keeps its
slot there, so that nothing of it moves.
"""

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

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


class LoadWindow:
    """Tokens that chose each expert of each layer, over the newest steps.

    Args:
        layers: Of experts.
        experts: Of a layer.
        size: Steps.
    """

    def __init__(self, layers: int, experts: int, size: int) -> None:
        self._steps = np.zeros((size, layers, experts), np.int64)
        self._at = 0

    def add(self, counts: Int64) -> None:
        """Takes in a step, [layers, experts]; the oldest one is forgotten."""
        self._steps[self._at % len(self._steps)] = counts
        self._at += 1

    def loads(self) -> Float64:
        """[layers, experts]."""
        return self._steps.sum(0).astype(np.float64)
