"""FlashInfer, where it is installed: one wrapper for decoding requests, one for those with several queries.

An adapter to the signatures of flashinfer-ai/flashinfer in August 2026. The library cannot be had where the project's tests run:
it is shown against stand-ins with those signatures, and has never met the library itself. It plans on the host, step by step,
from lengths that the host knows: such a step is in no CUDA graph.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.attention.backends.interface import (
    AttentionBackend,
    AttentionNeeds,
    StepLengths,
    StepMetadata,
    below,
    other_cache,
    outside,
)
from penstock.engine.runner.device.graphs.descriptor import GraphSupport
from penstock.kernels.paged_attention.device_batch import DeviceBatch

WORKSPACE_BYTES = 128 << 20
"""What the library recommends, for each wrapper."""
LATEST = (12, 1)


@dataclass(frozen=True)
class FlashInferMetadata:
    """A step in two parts: requests with one query first, then those with several; padding is in neither."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode: Any
    """The planned wrapper."""
    prefill: Any
    """The planned wrapper."""
    order: torch.Tensor
    """[decode tokens + prefill tokens], int64: which of the step's tokens they are."""


class FlashInferBackend(AttentionBackend):
    """Each KV group has wrappers of its own, since they keep their plan."""

    name = "flashinfer"

    def __init__(self, needs: AttentionNeeds) -> None:
        super().__init__(needs)
        self._library: Any = importlib.import_module("flashinfer")
        self._wrappers: dict[int, tuple[Any, Any]] = {}
        self._lengths: StepLengths | None = None
        self._metadata = StepMetadata(self._build)

    @classmethod
    def refusals(cls, needs: AttentionNeeds) -> list[str]:
        reasons = below(needs, (7, 5))
        if needs.capability is not None and needs.capability > LATEST:
            reasons.append("compute capability {}.{} is above {}.{}".format(*needs.capability, *LATEST))
        if importlib.util.find_spec("flashinfer") is None:
            reasons.append("flashinfer is not installed")
        reasons += outside(needs.dtype, (torch.bfloat16, torch.float16), "dtype")
        reasons += other_cache(needs)
        reasons += outside(needs.head_size, (64, 128, 256), "head size")
        for size in needs.block_sizes:
            reasons += outside(size, (16, 32, 64), "block size")
        if needs.sinks:
            reasons.append("attention sinks are not in the wrappers that are used here")
        if needs.value_size:
            reasons.append("latent attention is not in the wrappers that are used here")
        return reasons

    @classmethod
    def graph_support(cls, needs: AttentionNeeds) -> GraphSupport:
        return GraphSupport.NEVER

    def begin_step(self, lengths: StepLengths) -> None:
        self._lengths = lengths

    def _build(self, batch: DeviceBatch) -> FlashInferMetadata:
        lengths = self._lengths
        if lengths is None:
            raise RuntimeError("flashinfer plans on the host, which has not said how long the step's requests are")
        query_lens = np.diff(lengths.query_start_loc)
        live = lengths.seq_lens > 0
        decodes, prefills = np.flatnonzero(live & (query_lens == 1)), np.flatnonzero(live & (query_lens > 1))
        decode, prefill = self._wrappers_of(batch)
        window = -1 if batch.window is None else batch.window - 1
        common = {
            "window_left": window,
            "logits_soft_cap": self.needs.softcap or None,
            "sm_scale": self.needs.scale,
            "q_data_type": self.needs.dtype,
        }
        heads = (self.needs.num_heads, self.needs.num_kv_heads, self.needs.head_size, batch.block_size)
        if len(decodes):
            decode.plan(*self._pages(batch, lengths, decodes), *heads, **common)
        if len(prefills):
            starts = _starts(query_lens[prefills])
            prefill.plan(torch.from_numpy(starts), *self._pages(batch, lengths, prefills), *heads, causal=True, **common)
        order = [np.arange(*lengths.query_start_loc[row : row + 2]) for row in (*decodes, *prefills)]
        tokens = np.concatenate([np.empty(0, np.int64), *order])
        return FlashInferMetadata(
            num_decodes=len(decodes),
            num_decode_tokens=len(decodes),
            num_prefills=len(prefills),
            num_prefill_tokens=len(tokens) - len(decodes),
            decode=decode,
            prefill=prefill,
            order=self._upload(tokens.astype(np.int64)),
        )

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: DeviceBatch,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        value_size: int = 0,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sinks is not None or value_size or scales is not None:
            raise ValueError("flashinfer has no attention sinks, no latent attention and no scales of keys and values here")
        if (scale, softcap) != (self.needs.scale, self.needs.softcap):
            raise ValueError("flashinfer was planned for another scale or soft cap")
        step = self._metadata.of(batch, kv_cache)
        ordered, parts = q.index_select(0, step.order), []
        if step.num_decodes:
            parts.append(step.decode.run(ordered[: step.num_decode_tokens], kv_cache))
        if step.num_prefills:
            parts.append(step.prefill.run(ordered[step.num_decode_tokens :], kv_cache))
        found = torch.zeros_like(q) if out is None else out.zero_()
        return found.index_copy_(0, step.order, torch.cat(parts)) if parts else found

    def _wrappers_of(self, batch: DeviceBatch) -> tuple[Any, Any]:
        group = batch.block_table.data_ptr()
        if group not in self._wrappers:
            # The library asks for zeros before the first use.
            rooms = (torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.needs.device) for _ in range(2))
            self._wrappers[group] = (
                self._library.BatchDecodeWithPagedKVCacheWrapper(next(rooms), "HND", use_tensor_cores=True),
                self._library.BatchPrefillWithPagedKVCacheWrapper(next(rooms), "HND"),
            )
        return self._wrappers[group]

    def _pages(
        self, batch: DeviceBatch, lengths: StepLengths, requests: npt.NDArray[np.intp]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where each request's pages begin, the pages, and the number of tokens in each last page."""
        seq_lens = lengths.seq_lens[requests]
        counts = -(-seq_lens // batch.block_size)
        starts = _starts(counts)
        place = np.repeat(lengths.rows[requests].astype(np.int64) * batch.block_table.shape[1] - starts[:-1], counts)
        pages = batch.block_table.flatten()[self._upload(place + np.arange(starts[-1]))]
        last = seq_lens - (counts - 1) * batch.block_size
        return torch.from_numpy(starts), pages, torch.from_numpy(last.astype(np.int32))

    def _upload(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.needs.device, non_blocking=True) if self.needs.device == "cuda" else tensor


def _starts(counts: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
