"""How many KV blocks there are."""

import logging
import os
from pathlib import Path

import msgspec

from penstock.engine.cache.layout import KVLayout, longest_sequence, max_blocks
from penstock.engine.config import CacheConfig, ConfigError, EngineConfig

CPU_MEMORY_SHARE = 0.1
MIN_MODEL_LEN = 2
"""A token of the prompt and one of the answer."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")

_log = logging.getLogger(__name__)


class Memory(msgspec.Struct, frozen=True):
    """Bytes of the device: here the machine's memory, or its container's where that is less."""

    total: int
    free: int
    """What nobody uses now, this process and others counted; the page cache is free."""
    own: int
    """What this process has written: weights, and the programs themselves."""


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


def num_kv_blocks(config: EngineConfig, layout: KVLayout, memory: Memory, step_bytes: int) -> int:
    """Blocks to allocate, the null block included.

    Args:
        config: `cache.num_blocks`, or `cache.memory_bytes`, or `cache.memory_utilization`, or none of them.
        layout: How the model's layers share the pages.
        memory: As it is when the weights are loaded.
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
    if needed + step_bytes > memory.free:
        raise ConfigError(
            f"the KV cache does not fit: {source}, {needed:,} bytes in all, and {room}; "
            "--kv-cache-memory-bytes says how much it gets"
        )
    _log.info("KV cache: %s, %s bytes in all; %s", source, f"{needed:,}", room)
    return blocks


def _budget(cache: CacheConfig, memory: Memory, step_bytes: int) -> tuple[int, str]:
    """Bytes for the KV cache, and where they come from."""
    if cache.memory_bytes is not None:
        return cache.memory_bytes, f"--kv-cache-memory-bytes {cache.memory_bytes:,}"
    if cache.memory_utilization is None:
        return int(memory.total * CPU_MEMORY_SHARE), f"{CPU_MEMORY_SHARE:.0%} of {memory.total:,} bytes of memory"
    budget = int(memory.total * cache.memory_utilization) - memory.own - step_bytes
    parts = f"{memory.total:,} bytes of memory - {memory.own:,} with the weights - {step_bytes:,} for a step = {budget:,}"
    return budget, f"(--gpu-memory-utilization {cache.memory_utilization:g} x {parts})"


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
