"""How many KV blocks there are."""

import os
from pathlib import Path

from penstock.engine.config import ConfigError, EngineConfig

CPU_MEMORY_SHARE = 0.1
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine


def num_kv_blocks(config: EngineConfig, bytes_per_block: int, memory: int) -> int:
    """Blocks to allocate, the null block included.

    Args:
        config: `cache.num_blocks`, or `cache.memory_bytes`, or neither.
        bytes_per_block: Of one block over all layers.
        memory: Bytes that the process may use.

    Raises:
        ConfigError: Not even one sequence of full length fits; the message shows the arithmetic.
    """
    cache, length = config.cache, config.model.max_model_len
    per_sequence = -(-length // cache.block_size)
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
        fits = max(blocks - 1, 0) * cache.block_size
        raise ConfigError(
            f"the KV cache is too small: {source}, one of them reserved, and a sequence of --max-model-len {length} needs "
            f"{length} / {cache.block_size} tokens = {per_sequence}; what there is fits --max-model-len {fits}, or "
            f"--kv-cache-memory-bytes {(per_sequence + 1) * bytes_per_block} is enough"
        )
    return blocks
