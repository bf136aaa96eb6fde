"""What a step needs beside weights and KV cache: its intermediate tensors, measured on small steps and scaled up.

They grow with the step's tokens and the rows that sample, and with nothing else, so that two small steps give the line on which
the largest lies. The largest itself would make the start of a big model on a CPU slow.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

PROFILE_TOKENS = 64
"""Tokens of the larger of the two steps."""


class PeakMemory(TorchFunctionMode):
    """Counts the bytes of the tensors made within that live at the same time. What an operator needs for itself, and gives back
    before it returns, is not seen. (A dispatch mode would see some of it, and would import torch's compiler: seconds at every
    start.)"""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._holders: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and takes in what it returns."""
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._hold(tensor, inputs)
        return result

    def _hold(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        at, size = storage.data_ptr(), storage.nbytes()
        # A view of what was there before is no new memory.
        if not at or (at in inputs and at not in self._holders):
            return
        if not self._holders[at]:
            self._live += size
            self.peak = max(self.peak, self._live)
        self._holders[at] += 1
        weakref.finalize(tensor, self._release, at, size)

    def _release(self, at: int, size: int) -> None:
        self._holders[at] -= 1
        if not self._holders[at]:
            del self._holders[at]
            self._live -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Those with memory of their own kind: prepacked weights hide theirs, and no step makes any."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def peak_activation_bytes(step: Callable[[int, int], None], max_tokens: int, max_rows: int) -> int:
    """Bytes that the largest step takes for a while, or a little more: what its tokens take, and what the rows that sample do.

    Args:
        step: Runs a step of so many tokens, of which so many rows sample, and drops its results.
        max_tokens: Of the largest step.
        max_rows: Rows that sample in it.
    """
    return _scaled_up(lambda tokens: _peak(step, tokens, 1), max_tokens) + _scaled_up(
        lambda rows: _peak(step, rows, rows), max_rows
    )


def _peak(step: Callable[[int, int], None], tokens: int, rows: int) -> int:
    with PeakMemory() as memory:
        step(tokens, rows)
    return memory.peak


def _scaled_up(peak: Callable[[int], int], most: int) -> int:
    """The value at `most` of the line through two smaller steps."""
    large = min(PROFILE_TOKENS, most)
    if large == most:
        return peak(most)
    small = large // 2
    least, more = peak(small), peak(large)
    return more + (more - least) * (most - large) // (large - small)
