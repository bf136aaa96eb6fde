"""How many KV blocks there are."""

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.engine.cache.layout import KVLayout, longest_sequence, max_blocks
from penstock.engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from penstock.engine.connectors.moves import Lower, file_bytes

CPU_MEMORY_SHARE = 0.1
DEVICE_UTILIZATION = 0.9
"""Share of a device that the engine uses by default, if no other process is meant to use it."""
MIN_MODEL_LEN = 2
"""A token of the prompt and one of the answer."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")

_log = logging.getLogger(__name__)


class Memory(msgspec.Struct, frozen=True):
    """Bytes of the device, or of the host: the machine's memory, or its container's where that is less."""

    total: int
    free: int
    """Free bytes, other processes counted. A host's page cache is free."""
    own: int
    """What this process has: weights, what steps need for good, and on a host the programs themselves."""
    at_start: int | None = None
    """Free bytes of a device before anything was loaded."""
    graphs: int = 0
    """What CUDA graphs will take that are captured later."""

    def among(self, ranks: int) -> "Memory":
        """Return the share of one of that many ranks."""
        return msgspec.structs.replace(self, total=self.total // ranks, free=self.free // ranks)


def least(memories: Sequence[Memory]) -> Memory:
    """What every rank has, where each has measured its own."""
    return msgspec.structs.replace(
        memories[0],
        total=min(memory.total for memory in memories),
        free=min(memory.free for memory in memories),
        own=max(memory.own for memory in memories),
        graphs=max(memory.graphs for memory in memories),
    )


def measure_memory(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> Memory:
    """What there is now; the folder of the container's limits and the kernel's account are arguments for tests alone."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, own = 1024 * _fields(meminfo)["MemAvailable:"], 1024 * _fields(_STATUS)["RssAnon:"]
    limit = (cgroup / "memory.max").read_text().strip() if (cgroup / "memory.max").exists() else "max"
    if limit.isdigit() and int(limit) < total:
        stat = _fields(cgroup / "memory.stat")
        used = int((cgroup / "memory.current").read_text()) - stat["active_file"] - stat["inactive_file"]
        total, free = int(limit), min(free, int(limit) - used)
    return Memory(total, free, own)


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def stored_bytes(path: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def check_at_start(cache: CacheConfig, total: int, free: int) -> None:
    """Refuses a share of a device that is not free, before anything is loaded.

    Args:
        cache: Its `memory_utilization`, where that decides.
        total: Bytes of the device.
        free: Bytes that nobody uses.

    Raises:
        ConfigError: Others use too much; the message shows the arithmetic.
    """
    if cache.num_blocks is not None or cache.memory_bytes is not None:
        return
    share = DEVICE_UTILIZATION if cache.memory_utilization is None else cache.memory_utilization
    if (asked := int(total * share)) > free:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} x {total:,} bytes of memory = {asked:,}, but only {free:,} are free before "
            f"anything is loaded: others use {total - free:,}; at most --gpu-memory-utilization "
            f"{math.floor(100 * free / total) / 100:g} can be had"
        )


def check_weights_fit(model: ModelConfig, stored_bytes: int, memory: Memory, nodes: int = 1, copies: int = 1) -> None:
    """Refuses weights that the host's memory cannot hold, before any is read.

    Args:
        model: Its cost tells what the weights become; of a quantized checkpoint they stay as they are stored.
        stored_bytes: Of the checkpoint's files.
        memory: Of the host, for all of its ranks.
        nodes: Among which the weights are divided.
        copies: Data-parallel ranks, each with the whole model.

    Raises:
        ConfigError: There is less free; the message shows the arithmetic.
    """
    if model.stored_quantization is not None:
        needed, parts = stored_bytes, f"the checkpoint's files have {stored_bytes:,} bytes ({model.quantization_name})"
    elif (cost := model.cost) is not None:
        needed = cost.layer_weight_bytes + cost.lm_head_bytes
        kind = model.dtype if model.quantization is None else f"{model.dtype} and {model.quantization}"
        parts = f"layers of {cost.layer_weight_bytes:,} bytes + an LM head of {cost.lm_head_bytes:,}"
        parts += f" = {needed:,} bytes ({kind})"
    else:
        return
    if nodes > 1:
        needed //= nodes
        parts += f" / {nodes} nodes = {needed:,} bytes"
    if copies > 1:
        needed *= copies
        parts += f", for each of {copies} data-parallel ranks = {needed:,} bytes"
    if needed > memory.free:
        raise ConfigError(
            f"the weights do not fit: {parts}, and of {memory.total:,} bytes of memory {memory.free:,} are free before "
            "anything is loaded"
        )


class OffloadSize(msgspec.Struct, frozen=True):
    """Size of the host memory for pages of the KV cache, on each rank that keeps pages."""

    pages: int
    page_bytes: int
    lower_pages: dict[Lower, int] = {}
    """Pages that fit on the disk and into the object store."""
    keepers: tuple[int, ...] = (0,)
    """The ranks that keep pages."""


def num_kv_blocks(config: EngineConfig, layout: KVLayout, memory: Memory, step_bytes: int) -> int:
    """Blocks to allocate, the null block included.

    Args:
        config: `cache.num_blocks`, or `cache.memory_bytes`, or `cache.memory_utilization`, or none of them.
        layout: How the model's layers share the pages.
        memory: As it is when the weights are loaded; on a device, when the largest step has been run too.
        step_bytes: What the largest step takes beside weights and cache.

    Raises:
        ConfigError: Not even one sequence of full length fits, or the cache into the memory; the message shows the arithmetic.
    """
    cache, length, bytes_per_block = config.cache, config.model.max_model_len, layout.page_bytes
    per_sequence = max_blocks(layout.groups, length, config.max_in_flight)
    if cache.num_blocks is not None:
        blocks, source = cache.num_blocks, f"--num-gpu-blocks-override {cache.num_blocks}"
    else:
        budget, name = _budget(cache, memory, step_bytes)
        blocks = max(budget, 0) // bytes_per_block
        source = f"{name} / {bytes_per_block:,} bytes a block = {blocks} blocks"
    if blocks < per_sequence + 1:
        raise ConfigError(
            f"the KV cache is too small: {source}, one of them reserved, and a sequence of --max-model-len {length} needs "
            f"{_arithmetic(layout, config, per_sequence)}; {_advice(layout, config, blocks, per_sequence + 1)}"
        )
    needed = blocks * bytes_per_block
    room = f"of {memory.total:,} bytes of memory {memory.free:,} are free, the weights loaded, and a step takes {step_bytes:,}"
    room += f" and CUDA graphs {memory.graphs:,}" if memory.graphs else ""
    if needed + step_bytes + memory.graphs > memory.free:
        raise ConfigError(
            f"the KV cache does not fit: {source}, {needed:,} bytes in all, and {room}; "
            "--kv-cache-memory-bytes says how much it gets"
        )
    if config.device == "cpu" and needed + step_bytes + cache.offload_bytes > memory.free:
        raise ConfigError(
            f"--kv-offload-memory-bytes {cache.offload_bytes} does not fit beside the KV cache of {needed:,} bytes: {room}"
        )
    _log.info("KV cache: %s, %s bytes in all; %s", source, f"{needed:,}", room)
    return blocks


def _budget(cache: CacheConfig, memory: Memory, step_bytes: int) -> tuple[int, str]:
    """Bytes for the KV cache, and where they come from."""
    if cache.memory_bytes is not None:
        return cache.memory_bytes, f"--kv-cache-memory-bytes {cache.memory_bytes:,}"
    share = cache.memory_utilization
    if share is None and memory.at_start is None:
        return int(memory.total * CPU_MEMORY_SHARE), f"{CPU_MEMORY_SHARE:.0%} of {memory.total:,} bytes of memory"
    share = DEVICE_UTILIZATION if share is None else share
    budget = int(memory.total * share) - memory.own - step_bytes - memory.graphs
    parts = f"{memory.total:,} bytes of memory - {memory.own:,} with the weights - {step_bytes:,} for a step"
    parts += f" - {memory.graphs:,} for CUDA graphs" if memory.graphs else ""
    return budget, f"(--gpu-memory-utilization {share:g} x {parts} = {budget:,})"


def _advice(layout: KVLayout, config: EngineConfig, blocks: int, needed: int) -> str:
    """What would do, in the flag that has decided."""
    enough = f"--kv-cache-memory-bytes {needed * layout.page_bytes} is enough"
    if config.cache.num_blocks is not None:
        enough = f"--num-gpu-blocks-override {needed} is enough"
    fits = longest_sequence(layout.groups, max(blocks - 1, 0), config.max_in_flight, config.model.max_model_len)
    return f"what there is fits --max-model-len {fits}, or {enough}" if fits >= MIN_MODEL_LEN else enough


def _arithmetic(layout: KVLayout, config: EngineConfig, needed: int) -> str:
    length, in_flight = config.model.max_model_len, config.max_in_flight
    parts: list[str] = []
    for group in layout.groups:
        if group.window is None:
            parts.append(f"{length} / {group.block_size} tokens")
        else:
            parts.append(f"a window of {group.window} with {in_flight} in flight / {group.block_size} tokens")
    return f"{' + '.join(parts)} = {needed}"


def offload_size(config: EngineConfig, layout: KVLayout, keeper: Sequence[int]) -> OffloadSize | None:
    """Pages of the KV cache that host memory and what lies behind it hold; None: none. `ConfigError` where not one fits.

    Args:
        config: What each rank gives.
        layout: Of the largest pages.
        keeper: By rank, the one that keeps its pages, in what all of its ranks give.
    """
    same = min(Counter(keeper).values())
    cache, file = config.cache, file_bytes(layout.page_bytes)
    if not cache.offload_bytes:
        return None
    if cache.offload_bytes < layout.page_bytes:
        raise ConfigError(f"--kv-offload-memory-bytes {cache.offload_bytes} holds no page, which has {layout.page_bytes:,} bytes")
    lower: dict[Lower, int] = {}
    places: list[tuple[Lower, str, object, int]] = [
        ("disk", "--kv-offload-disk-bytes", cache.disk_folder, cache.disk_bytes),
        ("store", "--kv-offload-store-bytes", cache.store, cache.store_bytes),
        ("object", "--kv-offload-bucket-bytes", cache.bucket, cache.bucket_bytes),
    ]
    for name, flag, place, size in places:
        if place is not None:
            if size < file:
                raise ConfigError(f"{flag} {size} holds no page, whose file has {file:,} bytes")
            lower[name] = same * size // file
    pages = same * cache.offload_bytes // layout.page_bytes
    return OffloadSize(pages, layout.page_bytes, lower, tuple(sorted(set(keeper))))
