"""How many KV blocks there are."""

import os
from pathlib import Path

from penstock.engine.cache.layout import KVLayout, longest_sequence, max_blocks
from penstock.engine.config import ConfigError, EngineConfig

CPU_MEMORY_SHARE = 0.1
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine


def num_kv_blocks(config: EngineConfig, layout: KVLayout, memory: int) -> int:
    """Blocks to allocate, the null block included.

    Args:
        config: `cache.num_blocks`, or `cache.memory_bytes`, or neither.
        layout: How the model's layers share the pages.
        memory: Bytes that the process may use.

    Raises:
        ConfigError: Not even one sequence of full length fits; the message shows the arithmetic.
    """
    cache, length, bytes_per_block = config.cache, config.model.max_model_len, layout.page_bytes
    per_sequence = max_blocks(layout.groups, length, config.max_in_flight)
    if cache.num_blocks is not None:
        blocks, source = cache.num_blocks, f"--num-gpu-blocks-override {cache.num_blocks}"
    else:
        share = f"{CPU_MEMORY_SHARE:.0%} of {memory:,} bytes of memory"
        budget, name = int(memory * CPU_MEMORY_SHARE), share
        if cache.memory_bytes is not None:
            budget, name = cache.memory_bytes, f"--kv-cache-memory-bytes {cache.memory_bytes:,}"
        blocks = budget // bytes_per_block
        source = f"{name} / {bytes_per_block:,} bytes a block = {blocks} blocks"
    if blocks < per_sequence + 1:
        fits = longest_sequence(layout.groups, max(blocks - 1, 0), config.max_in_flight, length)
        raise ConfigError(
            f"the KV cache is too small: {source}, one of them reserved, and a sequence of --max-model-len {length} needs "
            f"{_arithmetic(layout, config, per_sequence)}; what there is fits --max-model-len {fits}, or "
            f"--kv-cache-memory-bytes {(per_sequence + 1) * bytes_per_block} is enough"
        )
    return blocks


def _arithmetic(layout: KVLayout, config: EngineConfig, needed: int) -> str:
    length, in_flight = config.model.max_model_len, config.max_in_flight
    parts: list[str] = []
    for group in layout.groups:
        if group.window is None:
            parts.append(f"{length} / {group.block_size} tokens")
        else:
            parts.append(f"a window of {group.window} with {in_flight} in flight / {group.block_size} tokens")
    return f"{' + '.join(parts)} = {needed}"
