"""What a request costs the picker's process in CPU, layer by layer: one process, no sockets, no Envoy.

    make bench-picker

The bytes that our own Envoy sends for one request (an exchange of headers and a body of 2 kB, one that shows the response's
head) go into the server's protocol as a transport would give them. `protocol` answers with bytes that were made before;
`messages` reads and writes the messages of ext_proc with a decision that is made already; `decision` is the whole picker at so
many replicas, with a prompt of 500 tokens that is tokenised and hashed already, with an audit log, and with tokenising, which
meets its caches; with a body of 16 kB, with a trace of its own in each call's and request's headers, and while 1,000 streams of
the same prompt are open, whose bookings count. "distinct" is all of it, tokenising included, with a prompt of its own in each
request, in Python and with the compiled parts (`make native`): a piece of this repository's pages, by the tokenizer of
`examples/models/penstock-tiny`, whose words earlier requests had, or in "unseen" no request. `h2 package` is the protocol alone
by the package of that name. Layers take turns, and the least of the rounds counts: that is what other processes disturb least.
`--shares` prints where the time of each layer goes.

"hot" is one request after the other; "cold" is with the core's caches overwritten before each read, which is what a request
finds that comes alone, on cores that do something else meanwhile (the median of its requests).
"""

import argparse
import contextlib
import gc
import itertools
import os
import random
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gatewaybench.backend import bundle
from benchmarks.gatewaybench.texts import DISTINCT, checkpoint, pages
from benchmarks.pickerbench.decisions import decision
from benchmarks.pickerbench.layers import h2_package, messages, protocol_alone
from benchmarks.pickerbench.proxy import LONG_BODY, READS, Play
from benchmarks.report import write_results
from benchmarks.shares import Shares
from penstock.gateway.load.compiled_hasher import CompiledMemo
from penstock.gateway.picker.compiled import installed, name_of
from penstock.prompt.memo import PrefixMemo
from penstock.prompt.processor import PromptProcessor

ROUNDS, REQUESTS, COLD_REQUESTS = 32, 100, 12
UNMEASURED, UNMEASURED_DISTINCT = 100, 1_000
"""Requests before the rounds; the compiled parts have met the pages' words after so many."""
REPLICAS = (1, 10, 100, 1000)
H2_PACKAGE = "h2 package"
OPEN_STREAMS = 1_000


def unseen_words() -> bytes:
    """Twenty megabytes of words by lot."""
    return re.sub(rb"(.{6})", rb"\1 ", random.Random(0).randbytes(9_000_000).hex().encode())


async def measure(rounds: int, only: str, shares: Shares | None = None) -> list[dict[str, Any]]:
    """A row a layer whose name has `only` in it. `shares`: takes samples meanwhile."""
    layers: dict[str, Play] = {H2_PACKAGE: h2_package(), "protocol": protocol_alone(), "messages": messages()}
    if (which := installed()) is not None:
        layers |= {"protocol, compiled": protocol_alone(which), "messages, compiled": messages(which)}
    layers |= {f"decision, {replicas} replicas": decision(replicas) for replicas in REPLICAS}
    layers["decision, 10 replicas, audit log"] = decision(10, Path(os.devnull))
    layers["decision, 10 replicas, tokenising"] = decision(10, memo=PrefixMemo(PromptProcessor(bundle())))
    layers["decision, 10 replicas, 16 kB"] = decision(10, body=LONG_BODY)
    layers["decision, 10 replicas, 16 kB, tokenising"] = decision(10, memo=PrefixMemo(PromptProcessor(bundle())), body=LONG_BODY)
    layers["decision, 10 replicas, traceparent"] = decision(10, traced=True)
    layers["decision, 10 replicas, 1,000 open streams"] = decision(10, open_streams=OPEN_STREAMS)
    kinds = ((3, "distinct", pages()), (100, "distinct", pages()), (3, "distinct unseen", unseen_words()))
    for (replicas, kind, texts), (size, body) in itertools.product(kinds, DISTINCT.items()):
        for which in dict.fromkeys((None, installed())):
            processor = PromptProcessor(checkpoint())
            memo = PrefixMemo(processor) if which is None else CompiledMemo(processor, which)
            name = f"decision, {replicas} replicas, {size}, {kind}, {name_of(which)}"
            layers[name] = decision(replicas, memo=memo, body=body, distinct=texts, compiled=which)
    layers = {name: play for name, play in layers.items() if only in name}
    least, cold = dict.fromkeys(layers, float("inf")), {name: list[float]() for name in layers}
    for name, play in layers.items():
        await play(UNMEASURED_DISTINCT if name.split(", ")[3:4] == ["distinct"] else UNMEASURED)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, play in layers.items():
            began = time.thread_time()
            with contextlib.nullcontext() if shares is None else shares.of(name):
                await play(REQUESTS)
            least[name] = min(least[name], (time.thread_time() - began) / REQUESTS)
            if name != H2_PACKAGE:
                await play(COLD_REQUESTS, cold[name])
    rows: list[dict[str, Any]] = [{"layer": name, "cpu_us": round(1e6 * seconds, 1)} for name, seconds in least.items()]
    return [row | ({"cold_us": round(1e6 * request_s(cold[row["layer"]]), 1)} if cold[row["layer"]] else {}) for row in rows]


def request_s(reads: list[float]) -> float:
    """What a request costs, of what each of its reads does."""
    return median(sum(reads[at : at + READS]) for at in range(0, len(reads) - READS + 1, READS))


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--only", default="", help="layers whose names have this in them (default: all)")
    parser.add_argument("--shares", action="store_true", help="print where the time goes, by samples, which themselves take time")
    parser.add_argument("--no-json", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # so that all that it takes is this thread's
    shares = Shares() if arguments.shares else None
    rows = uvloop.run(measure(arguments.rounds, arguments.only, shares))
    table = Table("layer", "hot", "cold", title="What a request costs the picker, in µs of CPU")
    for row in rows:
        table.add_row(row["layer"], str(row["cpu_us"]), str(row.get("cold_us", "")))
    Console().print(table)
    if shares is not None:
        Console().print(shares.table())
    if arguments.no_json:
        return 0
    path = write_results("picker", {"rows": rows})
    Console().print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
