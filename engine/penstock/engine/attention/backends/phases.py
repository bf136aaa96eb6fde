"""A model's attention: one backend for steps of decodes and one for steps with prompts, which mostly are the same."""

from dataclasses import replace
from typing import Any

import torch

from penstock.engine.attention.backends.interface import AttentionBackend, StepLengths
from penstock.engine.runner.device.graphs.descriptor import GraphSupport
from penstock.kernels.ops import Ops
from penstock.kernels.paged_attention.device_batch import DeviceBatch


class AttentionPhases:
    """What a runner holds. A step belongs to one phase as a whole, which follows from its numbers, not from its lengths: so each
    graph holds the kernels of one backend.

    Args:
        decode: Of steps in which no request has more than `max_decode_tokens` new tokens.
        prefill: Of all others.
        max_decode_tokens: A token and the drafts that are verified with it.
    """

    def __init__(self, decode: AttentionBackend, prefill: AttentionBackend, max_decode_tokens: int) -> None:
        self.decode, self.prefill = decode, prefill
        self._max_decode_tokens = max_decode_tokens

    @property
    def graph_support(self) -> GraphSupport:
        """Which steps can be captured."""
        decode, prefill = (backend.graph_support(backend.needs) for backend in (self.decode, self.prefill))
        # Of steps in which all requests have equally many tokens, those that are captured are decodes.
        return decode if prefill is GraphSupport.ALWAYS else min(decode, GraphSupport.UNIFORM_BATCH)

    def bind(self, ops: Ops) -> Ops:
        """The operations with this attention among them. Where one backend serves both phases, nothing is chosen in a step."""
        return self.decode.bind(ops) if self.decode is self.prefill else replace(ops, paged_attention=self._attend)

    def begin_step(self, lengths: StepLengths) -> None:
        """Called before a step that is not a captured graph."""
        for backend in {self.decode, self.prefill}:
            backend.begin_step(lengths)

    def _attend(self, q: torch.Tensor, kv_cache: torch.Tensor, batch: DeviceBatch, *given: Any, **options: Any) -> torch.Tensor:
        backend = self.decode if batch.max_query_len <= self._max_decode_tokens else self.prefill
        return backend.attend(q, kv_cache, batch, *given, **options)
