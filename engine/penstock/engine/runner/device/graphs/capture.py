"""The graphs of an engine: which there are, when they are captured, and what they cost.

A capture takes tens of milliseconds and the whole device, so none lies on a request's path: a few sizes are captured before
the first request, so that every batch finds one that is large enough, and the rest one at a time while nothing runs.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from penstock.engine.core.plan import GraphReport
from penstock.engine.models.layers.attention import Attention
from penstock.engine.runner.device.graphs.descriptor import BatchDescriptor, GraphMode
from penstock.engine.runner.device.graphs.dispatcher import GraphDispatcher
from penstock.engine.runner.device.graphs.pieces import Attend, AttentionOutputs, CapturingAttend, PiecewiseGraph
from penstock.engine.runner.device.graphs.replay import Arguments, FullGraph
from penstock.engine.runner.device.graphs.runtime import GraphRuntime
from penstock.engine.runner.device.graphs.sizes import first_sizes
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.kernels.prepare_kv.reference import Rotary

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before a capture: the first compiles and allocates what is made once, the second shows that nothing is left to make."""


class Capturable(Protocol):
    """A step as launches on persistent tensors: the same code eagerly, in a warm-up and under capture."""

    def arguments(self) -> Arguments:
        """The persistent tensors that a step reads."""
        ...

    def pad(self, key: BatchDescriptor) -> None:
        """Makes the persistent inputs those of a batch of padding alone, which changes nothing that anybody reads."""
        ...

    def step(self, key: BatchDescriptor) -> torch.Tensor:
        """The whole step, as far as its variant goes; its logits."""
        ...

    def forward(self, key: BatchDescriptor, attend: Attend) -> torch.Tensor:
        """The model alone, with the attention that is given: [num_tokens, hidden]."""
        ...

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The attention of the inputs as they are; see `ForwardContext.attend`."""
        ...


class _Pending(NamedTuple):
    mode: GraphMode
    key: BatchDescriptor


class GraphManager:
    """One rank's. Between steps and in the runner's thread alone.

    Args:
        device: Where everything runs.
        runtime: Captures.
        program: What is captured.
        dispatcher: Told of every graph.
        lora: Whether the engine serves adapters: each graph is then captured twice. One adds them to the tokens that have one,
            and serves any step; the other is for steps without, and saves these launches.
        variants: Of full graphs; see `BatchDescriptor.variant`. The first is captured first.
        sharing: The variant that is also captured, in idle time, in the form that reads a prefix of all requests apart; None:
            there is none.
        few: The variant whose mixed graphs are also captured, in idle time, for few requests; None: there is none.
    """

    def __init__(
        self,
        device: DeviceRuntime,
        runtime: GraphRuntime,
        program: Capturable,
        dispatcher: GraphDispatcher,
        lora: bool = False,
        variants: Sequence[Hashable] = (None,),
        sharing: Hashable = None,
        few: Hashable = None,
    ) -> None:
        self._device, self._runtime, self._program, self._dispatcher = device, runtime, program, dispatcher
        self.max_bytes: int | None = None
        """Memory that graphs may take: beyond it no further one is captured. None: no bound."""
        self._pool: object | None = None
        self._full: dict[BatchDescriptor, FullGraph] = {}
        self._pieces: dict[BatchDescriptor, PiecewiseGraph] = {}
        self._failures: list[str] = []
        self._bytes, self._seconds = 0, 0.0
        self._lora, self._variants, self._sharing, self._few = lora, variants, sharing, few
        self._plan()

    def report(self) -> GraphReport:
        """What there is so far."""
        captured = len(self._full) + len(self._pieces)
        return GraphReport(captured, len(self._pending), len(self._failures), self._bytes, self._seconds)

    def capture_first(self) -> None:
        """Those that should be there before the first request."""
        while self._num_first and self._pending:
            self._num_first -= 1
            self.capture_next()
        if self._full or self._pieces:
            words = "%d CUDA graphs captured in %.1f s, %s bytes; %d more are captured while the engine is idle"
            log.info(words, len(self._full) + len(self._pieces), self._seconds, f"{self._bytes:,}", len(self._pending))

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Captures one graph; nothing may be in flight. False: there is none to capture any more."""
        if not self._pending:
            return False
        mode, key = self._pending.popleft()
        if self.max_bytes is not None and self._bytes > self.max_bytes:
            words = "CUDA graphs take %s bytes of %s: %d sizes stay without one, and are padded to larger ones"
            log.warning(words, f"{self._bytes:,}", f"{self.max_bytes:,}", 1 + len(self._pending))
            self._pending.clear()
            return False
        began = time.perf_counter()
        try:
            with self._device.main_stream():
                self._capture(mode, key)
        except Exception as error:  # whatever a kernel or the driver refuses: the step runs without a graph
            self._runtime.abandon()
            self._failures.append(f"{type(error).__name__}: {error}")
            log.exception(
                "CUDA graphs: %s of %d tokens could not be captured; such steps run without", mode.value, key.num_tokens
            )
        self._seconds += time.perf_counter() - began
        return bool(self._pending)

    def replay_full(self, key: BatchDescriptor) -> torch.Tensor:
        """One launch for the whole step; its logits, to be read before the next replay."""
        return self._full[key].replay(self._program.arguments)

    def replay_forward(self, key: BatchDescriptor) -> torch.Tensor:
        """The model in pieces, with the program's attention between them: [num_tokens, hidden], to be read before the next
        replay."""
        return self._pieces[key].replay(self._program.arguments, self._program.attend)

    def clear(self) -> None:
        """Gives everything back, before what the graphs read goes away; `capture_first` begins anew."""
        self._device.synchronize()
        self._full.clear()
        self._pieces.clear()
        self._dispatcher.clear()
        self._plan()
        self._device.return_free_memory()

    def _plan(self) -> None:
        """What is to be captured: the first ones, largest first, so that the others fit into the memory that those have taken."""
        self._pool, self._bytes = None, 0
        self._outputs = AttentionOutputs(0)
        urgent: list[_Pending] = []
        later: list[_Pending] = []
        for group in self._candidates():
            first = first_sizes([item.key.num_tokens for item in group])
            key = group[0].key
            served = key.variant in (None, self._variants[0]) or (key.uniform_query_len or 1) > 1
            needed = served and key.has_lora == self._lora and not key.shares
            for item in group:
                (urgent if needed and item.key.num_tokens in first else later).append(item)
        urgent.sort(key=lambda item: -item.key.num_tokens)
        if self._few is not None:
            later += [_Pending(GraphMode.FULL, key) for key in self._dispatcher.few_candidates(self._lora, self._few)]
        self._num_first, self._pending = len(urgent), deque([*urgent, *later])

    def _candidates(self) -> list[list[_Pending]]:
        """All graphs there should be, by what tells them apart beside the size."""
        groups: dict[Hashable, list[_Pending]] = {}
        kinds, made = (False, True) if self._lora else (False,), self._dispatcher
        full = [key for variant in self._variants for kind in kinds for key in made.full_candidates(kind, variant)]
        full += [] if self._sharing is None else made.sharing_candidates(self._lora, self._sharing)
        pieces = [key for kind in kinds for key in made.piecewise_candidates(kind)]
        for mode, keys in ((GraphMode.FULL, full), (GraphMode.PIECEWISE, pieces)):
            for key in keys:
                groups.setdefault((mode, replace(key, num_tokens=0, num_reqs=None)), []).append(_Pending(mode, key))
        return list(groups.values())

    def _capture(self, mode: GraphMode, key: BatchDescriptor) -> None:
        program, device = self._program, self._device
        if self._pool is None:
            self._pool = self._runtime.new_pool()
            self._outputs = AttentionOutputs(max(item.key.num_tokens for item in [_Pending(mode, key), *self._pending]))
            gc.collect()
        program.pad(key)
        self._warm_up(mode, key)
        device.synchronize()
        device.return_free_memory()
        before = device.memory().free
        # A collection in the middle could free memory of the device, which ends a capture.
        enabled = gc.isenabled()
        gc.disable()
        try:
            if mode is GraphMode.FULL:
                self._runtime.begin(self._pool)
                logits = self._runtime.weak(program.step(key))
                self._full[key] = FullGraph(self._runtime.end(), logits, program.arguments())
            else:
                capturing = CapturingAttend(self._runtime, self._pool, self._outputs)
                self._pieces[key] = capturing.capture(lambda through: program.forward(key, through), program.arguments())
        finally:
            if enabled:
                gc.enable()
        device.synchronize()
        taken = before - device.memory().free
        self._bytes += taken
        self._dispatcher.add(mode, key)
        log.debug("CUDA graphs: %s of %d tokens, %s bytes", mode.value, key.num_tokens, f"{taken:,}")

    def _warm_up(self, mode: GraphMode, key: BatchDescriptor) -> None:
        for _ in range(WARM_UPS):
            if mode is GraphMode.FULL:
                self._program.step(key)
            else:
                # Attention is in none of the pieces, and has been run at the engine's warm-up.
                self._program.forward(key, self._outputs.provide)
