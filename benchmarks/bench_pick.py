"""What a pick costs: microseconds of CPU by policy, at 1 to 1,000 replicas with 10,000 blocks known of each.

    make bench-pick

`look-up` walks a prompt's 500 block hashes; the policies' columns are the slate and the choice without it. Tokens and hashes are
made elsewhere (`bench_requests.py`). `known prompt` is all of it, with `Cost`: in Python, and compiled (`make native`). Each
figure is the least of many repetitions, so that other work on the machine counts little.
"""

import argparse
import os
import random
import timeit
from collections.abc import Callable
from pathlib import Path

from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.api.events import BlockStored
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.choice import choose
from penstock.gateway.picker.compiled import Compiled, installed
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState

REPLICAS = (1, 10, 100, 1000)
PROMPT_BLOCKS, BLOCK = 500, 16
REPOSITORY = Path(__file__).parent.parent
MODEL = Model(id="bench/m", served_names=["m"])


def world(count: int, blocks: int, compiled: Compiled | None = None) -> tuple[FleetState, list[bytes]]:
    """A fleet of loaded replicas that cache random parts of one prompt, and its hashes."""
    rng, state = random.Random(count), FleetState(compiled=compiled)
    replicas = [
        Replica(
            uid=f"u{at}",
            name=f"m-{at}",
            pool="bench/m/p",
            host=f"10.0.{at >> 8}.{at & 255}",
            port=8000,
            events_port=1,
            replay_port=2,
            ready=True,
        )
        for at in range(count)
    ]
    state.update(Fleet(models=[MODEL], pools=[Pool(id="bench/m/p", model=MODEL.id)], replicas=replicas))
    hashes = [os.urandom(32) for _ in range(PROMPT_BLOCKS)]
    common = [os.urandom(32) for _ in range(blocks - PROMPT_BLOCKS)]
    for replica in replicas:
        key = key_of(replica)
        state.event(key, BlockStored(hashes[: rng.randrange(PROMPT_BLOCKS + 1)] + common), 0.0)
        report = LoadReport(
            epoch=1,
            seq=1,
            num_requests_running=rng.randrange(60),
            max_num_seqs=64,
            kv_cache_usage_perc=rng.random(),
            kv_blocks_total=20_000,
            kv_blocks_reclaimable=rng.randrange(20_000),
            prefill_backlog_tokens=rng.randrange(20_000),
            prefill_tokens_per_s=8000 * (1 + rng.random()),
            decode_step_s=0.02,
        )
        state.reported(key, report, 0.0)
    return state, hashes


def microseconds(work: Callable[[], object]) -> float:
    """Of one call."""
    return round(min(timeit.repeat(work, number=10, repeat=150)) / 10 * 1e6, 1)


def measure(count: int, blocks: int) -> dict[str, float]:
    """One row."""
    state, hashes = world(count, blocks)
    request = RequestView(
        id="r",
        path="",
        model="m",
        prompts=(
            Prompt(
                PROMPT_BLOCKS * BLOCK,
            ),
        ),
        block_size=BLOCK,
    )
    row: dict[str, float] = {"replicas": count, "look-up": microseconds(lambda: state.residency.spans(hashes))}
    for policy in POLICIES:
        row[policy] = microseconds(lambda policy=policy: choose(state.slates.of(MODEL, request, 0.5), policy))
    row["known prompt"] = pick_of(state, hashes)
    if (compiled := installed()) is not None:
        row["the same, compiled"] = pick_of(*world(count, blocks, compiled))
    return row


def pick_of(state: FleetState, hashes: list[bytes]) -> float:
    """Microseconds from a prompt's hashes to the choice."""
    prompt = Prompt(PROMPT_BLOCKS * BLOCK + 1, tuple(hashes))
    request = RequestView(id="r", path="", model="m", prompts=(prompt,), block_size=BLOCK)
    return microseconds(lambda: state.picks.of(MODEL, request, 0.5))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000, help="known of each replica")
    args = parser.parse_args()
    rows = [measure(count, args.blocks) for count in REPLICAS]
    table = Table(title="microseconds a pick")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    path = write_results("pick", {"blocks": args.blocks, "rows": rows})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
