"""Piecewise graphs: what lies between two attentions is captured, attention runs kernel by kernel in the gaps.

    embed, norm, qkv | attend | o_proj, norm, mlp, norm, qkv | attend | … | o_proj, norm, mlp, norm
      graph 0          gap 0              graph 1              gap 1            graph n

So a graph knows of tokens alone, never of requests, and serves every mixture of prefills and decodes with as many tokens. The
cut is made in `ForwardContext.attend`, through which all attention passes: the model is plain Python and runs once, while it is
captured.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.engine.models.layers.attention import Attention
from penstock.engine.runner.device.graphs.replay import Arguments, addresses, check_addresses, log
from penstock.engine.runner.device.graphs.runtime import CapturedGraph, GraphRuntime
from penstock.kernels.prepare_kv.reference import Rotary

Attend = Callable[[Attention, torch.Tensor, torch.Tensor, torch.Tensor, Rotary], torch.Tensor]
"""As `ForwardContext.attend`, without a place for the result."""
AttendInto = Callable[[Attention, torch.Tensor, torch.Tensor, torch.Tensor, Rotary, torch.Tensor], object]
"""As `ForwardContext.attend`, with the place where the result must be."""


@dataclass(frozen=True)
class Gap:
    """An attention between two graphs: the first leaves queries, keys and values, the second finds the result in `out`."""

    layer: Attention
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotary: Rotary
    out: torch.Tensor


class PiecewiseGraph:
    """One forward pass.

    Args:
        graphs: One more than gaps.
        gaps: In their order.
        hidden: What the last graph leaves, [n, hidden]: in the pool, so the next replay overwrites it.
        arguments: What the first one read when it was captured.
    """

    def __init__(self, graphs: list[CapturedGraph], gaps: list[Gap], hidden: torch.Tensor, arguments: Arguments) -> None:
        self._graphs, self._gaps, self._hidden = graphs, gaps, hidden
        self._addresses = addresses(arguments)

    def replay(self, arguments: Callable[[], Arguments], attend: AttendInto) -> torch.Tensor:
        """Runs it with the step's own attention; [n, hidden], to be read before the next replay."""
        if log.isEnabledFor(logging.DEBUG):
            check_addresses(self._addresses, arguments())
        for graph, gap in zip(self._graphs, self._gaps, strict=False):
            graph.replay()
            attend(gap.layer, gap.q, gap.k, gap.v, gap.rotary, gap.out)
        self._graphs[-1].replay()
        return self._hidden


class AttentionOutputs:
    """Where attention leaves its result for the next graph: one buffer for all layers and sizes, since the graph after the gap is
    done with it before the next gap."""

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, layer: Attention, q: torch.Tensor) -> torch.Tensor:
        """[n, the layer's `out_size`] for the n queries."""
        width = layer.out_size
        if (width, q.dtype) not in self._buffers:
            raise RuntimeError(f"no buffer for attention of width {width} in {q.dtype}: the model was not run before its capture")
        return self._buffers[width, q.dtype][: q.shape[0]]

    def provide(self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """In place of attention: allocates what `of` gives, and gives it as it is; not while a graph is captured, whose pool it
        would come from."""
        key = (layer.out_size, q.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self._max_num_tokens, key[0], dtype=q.dtype, device=q.device)
        return self.of(layer, q)


class CapturingAttend:
    """Stands in for attention while a forward pass is captured: ends a graph, notes the gap, begins the next graph."""

    def __init__(self, runtime: GraphRuntime, pool: object, outputs: AttentionOutputs) -> None:
        self._runtime, self._pool, self._outputs = runtime, pool, outputs
        self._graphs: list[CapturedGraph] = []
        self._gaps: list[Gap] = []

    def __call__(self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """See `ForwardContext.attend`; nothing is computed."""
        self._graphs.append(self._runtime.end())
        weak, out = self._runtime.weak, self._outputs.of(layer, q)
        self._gaps.append(Gap(layer, weak(q), weak(k), weak(v), Rotary(weak(rotary.cos), weak(rotary.sin)), out))
        self._runtime.begin(self._pool)
        return out

    def capture(self, forward: Callable[[Attend], torch.Tensor], arguments: Arguments) -> PiecewiseGraph:
        """Captures a forward pass that calls what it is given for every attention."""
        self._runtime.begin(self._pool)
        try:
            hidden = forward(self)
            self._graphs.append(self._runtime.end())
        except BaseException:
            self._runtime.abandon()
            raise
        return PiecewiseGraph(self._graphs, self._gaps, self._runtime.weak(hidden), arguments)
