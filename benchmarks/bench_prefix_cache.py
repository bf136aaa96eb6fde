"""What share of a real trace's prompt tokens the prefix cache supplies, beside caches that know more.

    make bench-prefix-cache

The trace is one hour of a chat service (Mooncake, FAST'25); `hash_ids` say which prompts share which blocks of 512 tokens.
Requests go, one after the other, through the engine's own `KVCacheManager` with room for 10, 30 and 100 % of the trace's blocks.
Beside it:

- radix: a tree of blocks that evicts the leaf whose last use lies furthest back, as SGLang's RadixAttention does;
- infinite: nothing is ever evicted; the most that any cache can reach.

A second table has a tier of host memory behind a cache of 10 %. Blocks are copied there when they are computed.
"""

import argparse
import heapq
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_results
from penstock.engine.cache.kv_manager import CacheHit, KVCacheManager
from penstock.engine.cache.layout import full_attention
from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.sim.traces import trace_folder

BLOCK = 512
SHARES = (0.1, 0.3, 1.0)
TIER_SHARES = (0.1, 0.3, 0.6)
"""Of the trace's blocks, in host memory behind a cache of the first of `SHARES`."""
TARGET_POINTS = 0.5
TRACE = trace_folder(Path(__file__)) / "mooncake-conversation.jsonl"


class Prompt(msgspec.Struct):
    """One request of the trace, and what the cache must know of it."""

    input_length: int
    hash_ids: list[int]
    index: int = 0

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Names of its full blocks; the last id of a prompt stands for what is left over."""
        return [number.to_bytes(4, "big") for number in self.hash_ids[: self.input_length // BLOCK]]


def read_trace(path: Path) -> list[Prompt]:
    """The trace's prompts in the order of their arrival."""
    prompts = [msgspec.json.decode(line, type=Prompt) for line in path.read_bytes().splitlines()]
    return [msgspec.structs.replace(prompt, index=index) for index, prompt in enumerate(prompts)]


def working_set(prompts: Sequence[Prompt]) -> int:
    """Different full blocks."""
    return len({name for prompt in prompts for name in prompt.block_hashes})


def replay(prompts: Sequence[Prompt], num_blocks: int, tier: TierIndex | None = None) -> int:
    """Tokens that the engine's cache and a tier behind it supply, with room for this many blocks."""
    kv = KVCacheManager(num_blocks + 1, full_attention(BLOCK), enable_prefix_caching=True, watermark=0.0, max_in_flight=1 << 20)
    tokens = 0
    for prompt in prompts:
        hit = kv.lookup(prompt, prompt.input_length)
        if kv.allocate(prompt, prompt.input_length, local=hit) is None:
            continue  # longer than the cache: no engine could serve it
        found = hit.num_tokens if tier is None else _from_tier(kv, tier, prompt, hit)
        tokens += found
        kv.commit(prompt, prompt.input_length)
        kv.free(prompt)
        kv.events.take()
    return tokens


def _from_tier(kv: KVCacheManager, tier: TierIndex, prompt: Prompt, hit: CacheHit) -> int:
    """Tokens of a prompt that the cache and the tier supply; what is computed is in the tier afterwards."""
    found, missing = kv.elsewhere(prompt, prompt.input_length, hit, lambda group, name: Key(group, name) in tier)
    tier.touch([Key(group, name) for group, _, name in missing])
    for name in prompt.block_hashes[found // BLOCK :]:
        if (slot := tier.reserve(Key(0, name))) is not None:
            tier.written(Key(0, name), slot, ok=True)
    return found


class RadixCache:
    """A tree of blocks with a clock on each; evicts leaves, the longest unused first. `capacity` in blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}
        self._parent: dict[bytes, bytes | None] = {}
        self._leaves: list[tuple[int, bytes]] = []
        self._clock = 0

    def serve(self, names: Sequence[bytes], num_tokens: int) -> int:
        """Tokens found; the whole prompt is cached afterwards, and what does not fill a block takes one too meanwhile."""
        self._clock += 1
        needed = -(-num_tokens // BLOCK)
        if needed > self._capacity:
            return 0
        found = 0
        while found < (num_tokens - 1) // BLOCK and names[found] in self._used:
            found += 1
        for name in names:
            if name in self._used:
                self._use(name)
        new = sum(name not in self._used for name in names) + needed - len(names)
        self._evict(len(self._used) + new - self._capacity, keep=set(names))
        for parent, name in zip([None, *names], names, strict=False):
            if name not in self._used:
                self._parent[name], self._children[name] = parent, 0
                if parent is not None:
                    self._children[parent] += 1
            self._use(name)
        return found * BLOCK

    def _use(self, name: bytes) -> None:
        self._used[name] = self._clock
        heapq.heappush(self._leaves, (self._clock, name))

    def _evict(self, count: int, keep: set[bytes]) -> None:
        kept: list[tuple[int, bytes]] = []
        while count > 0:
            clock, name = heapq.heappop(self._leaves)
            if self._used.get(name) != clock or self._children[name]:
                continue
            if name in keep:
                kept.append((clock, name))
                continue
            del self._used[name], self._children[name]
            count -= 1
            if (parent := self._parent.pop(name)) is not None:
                self._children[parent] -= 1
                heapq.heappush(self._leaves, (self._used[parent], parent))
        for entry in kept:
            heapq.heappush(self._leaves, entry)


def replay_radix(prompts: Sequence[Prompt], num_blocks: int) -> int:
    """Tokens that the radix cache supplies."""
    cache = RadixCache(num_blocks)
    return sum(cache.serve(prompt.block_hashes, prompt.input_length) for prompt in prompts)


def replay_infinite(prompts: Sequence[Prompt]) -> int:
    """Tokens that a cache supplies that never forgets."""
    known: set[bytes] = set()
    tokens = 0
    for prompt in prompts:
        names = prompt.block_hashes
        for name in names[: (prompt.input_length - 1) // BLOCK]:
            if name not in known:
                break
            tokens += BLOCK
        known.update(names)
    return tokens


def measure(prompts: Sequence[Prompt]) -> Iterator[dict[str, float]]:
    """One row a cache size; rates in percent of all prompt tokens."""
    total, blocks = sum(prompt.input_length for prompt in prompts), working_set(prompts)
    most = replay_infinite(prompts)
    for share in SHARES:
        # At least the longest prompt, which must fit as it would in any engine.
        num_blocks = max(round(share * blocks), *(-(-prompt.input_length // BLOCK) for prompt in prompts))
        began = time.process_time()
        ours = replay(prompts, num_blocks)
        seconds = time.process_time() - began
        radix = replay_radix(prompts, num_blocks)
        yield {
            "cache_percent": 100 * share,
            "blocks": num_blocks,
            "penstock_percent": round(100 * ours / total, 2),
            "radix_percent": round(100 * radix / total, 2),
            "infinite_percent": round(100 * most / total, 2),
            "microseconds_a_block": round(1e6 * seconds / sum(len(prompt.block_hashes) for prompt in prompts), 2),
        }


def measure_tiers(prompts: Sequence[Prompt]) -> Iterator[dict[str, float]]:
    """One row a size of the tier; rates in percent of all prompt tokens."""
    total, blocks = sum(prompt.input_length for prompt in prompts), working_set(prompts)
    cache, most = round(SHARES[0] * blocks), replay_infinite(prompts)
    policies: tuple[PolicyName, ...] = get_args(PolicyName)
    for share in TIER_SHARES:
        tiers = {name: TierIndex(round(share * blocks), policy=name) for name in policies}
        yield {
            "tier_percent": 100 * share,
            "tier_blocks": round(share * blocks),
            **{f"{name}_percent": round(100 * replay(prompts, cache, tier) / total, 2) for name, tier in tiers.items()},
            "infinite_percent": round(100 * most / total, 2),
        }


def main() -> int:
    """Prints the table, writes the JSON; 1 where the target is missed and `--check` was asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=TRACE, help="JSON lines with input_length and hash_ids")
    parser.add_argument("--check", action="store_true", help=f"fail more than {TARGET_POINTS} points below the radix cache")
    arguments = parser.parse_args()
    console = Console()
    if not arguments.trace.is_file():
        console.print(f"there is no trace at {arguments.trace}: give one with --trace")
        return 2
    prompts = read_trace(arguments.trace)
    rows = list(measure(prompts))
    title = f"Prefix cache, {len(prompts):,} requests, {working_set(prompts):,} blocks of {BLOCK} tokens"
    table = Table("cache % of blocks", "blocks", "Penstock hit %", "radix hit %", "infinite hit %", "CPU µs a block", title=title)
    for row in rows:
        table.add_row(*[f"{value:g}" for value in row.values()])
    console.print(table)
    tiers = list(measure_tiers(prompts))
    title = f"Host memory behind a cache of {100 * SHARES[0]:g} % of the blocks"
    table = Table("tier % of blocks", "blocks", "LRU hit %", "ARC hit %", "infinite hit %", title=title)
    for row in tiers:
        table.add_row(*[f"{value:g}" for value in row.values()])
    console.print(table)
    path = write_results("prefix-cache", {"trace": arguments.trace.name, "rows": rows, "tiers": tiers})
    console.print(f"written to {path}")
    return int(arguments.check and any(row["penstock_percent"] < row["radix_percent"] - TARGET_POINTS for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
