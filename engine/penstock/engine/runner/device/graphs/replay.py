"""A captured step, and the law of its addresses."""

import logging
from collections.abc import Callable, Mapping

import torch

from penstock.engine.runner.device.graphs.runtime import CapturedGraph

log = logging.getLogger(__name__)

Arguments = Mapping[str, torch.Tensor]
"""The tensors that a step reads from outside its graph, by name."""


def addresses(arguments: Arguments) -> dict[str, int]:
    """Where each tensor begins."""
    return {name: tensor.data_ptr() for name, tensor in arguments.items()}


class FullGraph:
    """One graph. It owns no buffer and copies nothing: its inputs must lie where they lay when it was captured, and its results
    are where its last kernels put them.

    Args:
        graph: As captured.
        result: What it leaves: in the pool, so the next replay overwrites it.
        arguments: What it read when it was captured.
    """

    def __init__(self, graph: CapturedGraph, result: torch.Tensor, arguments: Arguments) -> None:
        self._graph, self._result = graph, result
        self._addresses = addresses(arguments)

    def replay(self, arguments: Callable[[], Arguments]) -> torch.Tensor:
        """Launches it. With debug logging on, RuntimeError where an argument has moved; otherwise nobody asks for them."""
        if log.isEnabledFor(logging.DEBUG):
            check_addresses(self._addresses, arguments())
        self._graph.replay()
        return self._result


def check_addresses(expected: Mapping[str, int], arguments: Arguments) -> None:
    """RuntimeError where an argument is not where it was captured, with both lists."""
    found = addresses(arguments)
    if found != expected:
        moved = [name for name in expected if found.get(name) != expected[name]]
        raise RuntimeError(
            f"a graph reads {', '.join(moved) or 'other arguments'} where it was captured, and this step has it elsewhere: "
            f"expected {_shown(expected)}; found {_shown(found)}"
        )


def _shown(where: Mapping[str, int]) -> str:
    return ", ".join(f"{name}=0x{address:x}" for name, address in where.items())
