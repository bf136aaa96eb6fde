"""Prefill and decode on replicas of their own: tokens' times beside two mixed replicas, and what aborted pairs leave behind.

    make bench-disaggregation
    make bench-disaggregation ARGS=--quick
    make bench-disaggregation ARGS="--only latency"

The first table: a prefill and a decode replica against two mixed ones. Each is a process with one thread on a core of its own.
All have the same chunk budget. Prompts are alike and arrive at random (Poisson) at half of what two mixed replicas can do.
Answers are so long that prefill and decode take the core-seconds of the row's ratio. The gate: at 1:1 the 99th percentile of
the time between tokens is at most half of the mixed replicas'. Both kinds of fleet take turns, three rounds of each. "Pulled" are
requests whose pages came from the prefill replica; the decode replica has computed the others' prompts.

The second table: pairs of two cores with a small model in one process. One in five ends well. The others are aborted at random
phases on either side, or nobody fetches their pages. The gate: when the leases have run out, neither side holds anything.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from peers.ports import free_ports
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.messages import AbortRequests, AddRequest, Finished, RemotePrefix
from penstock.engine.sampling import SamplingParams

PROMPT, BUDGET, SEQUENCES = 512, 128, 32
RATIOS = (2.0, 1.0, 0.5)
"""Core-seconds of prefill to those of decode."""
LOAD, GATE = 0.5, 0.5
REQUESTS, QUICK_REQUESTS = 50, 12
"""In each of the rounds, in which the fleets take turns."""
ROUNDS = 3
PAIRS, QUICK_PAIRS = 10_000, 500
MOST_TOKENS, MORE = 2 * PROMPT, 65
"""Tokens of an answer at most, and where a token's time is measured."""
LEASE_S, SHORT_LEASE_S, PATIENCE_S = 30.0, 5.0, 120.0
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
LARGE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6, "head_dim": 64}


class Job(msgspec.Struct, frozen=True):
    """A request, and when it arrives."""

    index: int
    arrives: float
    """Unix time in seconds."""
    prompt: list[int]
    tokens: int


class Seen(msgspec.Struct):
    """When the tokens of a request came, Unix time in seconds."""

    arrived: float
    times: list[float]


def save_model(folder: Path, shape: dict[str, int]) -> None:
    """A random Llama in bf16."""
    torch.manual_seed(0)
    rest = {"vocab_size": 8000, "max_position_embeddings": 4 * PROMPT, "eos_token_id": None}
    config = transformers.LlamaConfig(num_key_value_heads=shape["num_attention_heads"], **shape, **rest)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Side:
    """A core turned by hand; with a role, one half of a pair.

    Args:
        folder: Has the checkpoint and the secret.
        role: As in `--kv-transfer-config`; None: a mixed replica.
        lease_s: Seconds for which a prefill replica holds pages that nobody fetches.
    """

    def __init__(self, folder: Path, role: str | None, lease_s: float = LEASE_S) -> None:
        transfer: dict[str, Any] = {}
        if role is not None:
            [port] = free_ports(1)
            config = {"kv_connector": "transfer", "kv_role": role, "kv_port": port}
            transfer["kv_transfer_config"] = {**config, "kv_connector_extra_config": {"kv_lease_duration": lease_s}}
            transfer["kv_transfer_secret_file"] = str(folder / "secret")
            transfer["kv_offload_memory_bytes"] = 2**28
        args = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SEQUENCES, "kv_cache_memory_bytes": 2**28}
        config = EngineArgs(model=str(folder), device="cpu", max_model_len=4 * PROMPT, **args, **transfer).config()
        executor, blocks = build_executor(config)
        self.core = build_core(config, executor, blocks, epoch=1)
        self.transfer = config.transfer
        self.finished: dict[int, Finished] = {}

    def add(self, index: int, prompt: list[int], tokens: int, **more: Any) -> None:
        """A request; the model has no end of its own."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        self.core.handle(AddRequest(index, str(index), prompt, sampling, time.time(), **more))

    def step(self) -> list[int]:
        """One step; the requests that got a token."""
        if (frame := self.core.step()) is None:
            return []
        for ended in frame.finished:
            if ended.error is not None:
                raise RuntimeError(f"a request failed: {ended}")
            self.finished[ended.index] = ended
        return np.frombuffer(frame.indexes, np.int64).tolist()

    @property
    def is_busy(self) -> bool:
        """Whether a step has something to do."""
        return self.core.has_work or self.core.is_reading or self.is_granting

    @property
    def is_granting(self) -> bool:
        """Whether a lease waits for its pages to be written."""
        return self._transfer is not None and self._transfer.leases.is_due

    @property
    def _transfer(self) -> Any:
        return None if self.transfer is None else self.core._offload.transfer  # pyright: ignore

    def lent(self, index: int) -> RemotePrefix | None:
        """What the end of a prefill request says to a decode replica."""
        told, it = self.finished.pop(index).lent, self.transfer
        if told is None or it is None:
            return None
        blocks = [len(group) for group in told.blocks]
        where = told.engine_id, told.hosts, told.port
        return RemotePrefix(told.lease, *where, told.fingerprint, told.num_tokens, blocks, optional=True)

    @property
    def num_pulls(self) -> int:
        """Requests whose pages came from the other side."""
        offload = self.core.stats().offload
        return 0 if offload is None or offload.transfer is None else offload.transfer.pulls

    def held(self) -> dict[str, int]:
        """What is held now: blocks of the KV cache, pages of the host's memory, leases, requests."""
        offload, scheduler = self.core._offload, self.core.scheduler  # pyright: ignore
        assert offload is not None
        pages = len(offload.tier._readers) + len(offload.tier._writing)
        told = self.core.stats().offload
        assert told is not None and told.transfer is not None
        live = scheduler.num_running + sum(scheduler.waiting().values())
        return {"blocks": scheduler.kv.pool.num_used, "pages": pages, "leases": told.transfer.leases, "requests": live}


# --- aborted pairs ---


def aborts(pairs: int) -> dict[str, Any]:
    """Runs pairs of which one in five ends well, and tells what both sides hold when the leases are over."""
    rng = np.random.default_rng(0)
    phases = dict.fromkeys(("prefill", "not fetched", "decode", "whole"), 0)
    with tempfile.TemporaryDirectory() as name, Console(stderr=True).status("pairs") as status:
        folder = Path(name)
        save_model(folder, SMALL)
        (folder / "secret").write_text("a secret of many bytes")
        sides = {"prefill": Side(folder, "kv_producer", SHORT_LEASE_S), "decode": Side(folder, "kv_consumer", SHORT_LEASE_S)}
        prefill, decode = sides.values()
        for number in range(pairs):
            phase = "whole" if number % 5 == 0 else ("prefill", "not fetched", "decode", "decode")[rng.integers(0, 4)]
            phases[phase] += 1
            prompt = rng.integers(0, 8000, int(rng.integers(40, 100))).tolist()
            prefill.add(number, prompt, 1, lends=True)
            if phase == "prefill":
                _steps(prefill, int(rng.integers(0, 4)))
                prefill.core.handle(AbortRequests([number]))
                continue
            while number not in prefill.finished:
                prefill.step()
            remote = prefill.lent(number)
            # A decode replica may come before the pages are granted.
            while prefill.is_granting and rng.integers(0, 2):
                prefill.step()
            if phase == "not fetched":
                continue
            decode.add(number, prompt, 6, remote=remote)
            if phase == "whole":
                while number not in decode.finished:
                    decode.step()
                    _steps(prefill, int(prefill.is_granting))
            else:
                _steps(decode, int(rng.integers(0, 12)))
                decode.core.handle(AbortRequests([number]))
            if not number % 100:
                status.update(f"{number} of {pairs} pairs")
        during = {name: side.held() for name, side in sides.items()}
        deadline = time.monotonic() + PATIENCE_S
        while any(sum(side.held().values()) for side in sides.values()) and time.monotonic() < deadline:
            for side in sides.values():
                side.step()
            time.sleep(0.01)
        after = {name: side.held() for name, side in sides.items()}
        told = {name: side.core.stats().offload for name, side in sides.items()}
        moved = {name: msgspec.to_builtins(it.transfer) for name, it in told.items() if it is not None}
        for side in sides.values():
            side.core.close()
    return {"pairs": pairs, "phases": phases, "held_at_the_last_abort": during, "held_after_the_leases": after, "transfer": moved}


def _steps(side: Side, count: int) -> None:
    for _ in range(count):
        side.step()


# --- times of tokens ---


def replica(folder: Path, role: str | None, core: int, pipe: Connection, peer: Connection | None) -> None:
    """A replica on a core of its own: answers lists of jobs with when their tokens came, until it gets None."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    side = Side(folder, role)
    pipe.send("ready")
    while (jobs := pipe.recv()) is not None:
        before = side.num_pulls
        seen = _serve(side, role, jobs, peer)
        pipe.send((seen, side.num_pulls - before))
    side.core.close()


def _serve(side: Side, role: str | None, jobs: Sequence[Job], peer: Connection | None) -> dict[int, Seen]:
    seen = {job.index: Seen(job.arrives, []) for job in jobs}
    by_index, due, done = {job.index: job for job in jobs}, list(jobs), 0
    while done < len(jobs):
        now = time.time()
        if role == "kv_consumer":
            while peer is not None and peer.poll():
                index, remote = peer.recv()
                side.add(index, by_index[index].prompt, by_index[index].tokens, remote=remote)
        while role != "kv_consumer" and due and due[0].arrives <= now:
            job = due.pop(0)
            side.add(job.index, job.prompt, 1 if role else job.tokens, lends=role is not None)
        if not side.is_busy:
            time.sleep(0.0005)
            continue
        got, now = side.step(), time.time()
        for index in got:
            seen[index].times.append(now)
        for index in [index for index in side.finished if index in by_index]:
            done += 1
            if role == "kv_producer" and peer is not None:
                peer.send((index, side.lent(index)))
            else:
                del side.finished[index]
    while role == "kv_producer" and side.held()["leases"]:  # until the other side has fetched all
        side.step()
        time.sleep(0.0005)
    return seen


class Fleet:
    """Replicas in processes of their own, each on a core."""

    def __init__(self, folder: Path, roles: Sequence[str | None]) -> None:
        spawn, cores = multiprocessing.get_context("spawn"), sorted(os.sched_getaffinity(0))
        ends = spawn.Pipe() if "kv_producer" in roles else (None, None)
        self._pipes: list[Connection] = []
        self._roles = roles
        self._processes: list[Any] = []
        for core, role, peer in zip(cores, roles, ends, strict=False):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=replica, args=(folder, role, core, theirs, peer), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def serve(self, jobs: Sequence[Job]) -> tuple[list[Seen], int]:
        """Serves jobs and returns when their tokens came, and how many were pulled. Mixed replicas take them in turn."""
        mixed = None in self._roles
        for number, pipe in enumerate(self._pipes):
            pipe.send(list(jobs[number :: len(self._pipes)]) if mixed else list(jobs))
        told = [pipe.recv() for pipe in self._pipes]
        answers = [seen for seen, _ in (told if mixed else told[1:])]
        return [it for seen in answers for it in seen.values()], sum(pulls for _, pulls in told)

    def close(self) -> None:
        """Ends it."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def work(count: int, tokens: int, rate: float, seed: int) -> list[Job]:
    """Prompts of one length that arrive at random; at `rate` 0 all at once."""
    rng, at, jobs = np.random.default_rng(seed), time.time() + 0.1, list[Job]()
    for number in range(count):
        at += float(rng.exponential(1 / rate)) if rate else 0.0
        jobs.append(Job(seed * 100_000 + number, at, rng.integers(0, 8000, PROMPT).tolist(), tokens))
    return jobs


def speeds(mixed: Fleet) -> tuple[float, float]:
    """Seconds that two mixed replicas take for 16 prompts, and for one more token of each."""

    def seconds(tokens: int, seed: int) -> float:
        began = time.time() + 0.1
        return max(it.times[-1] for it in mixed.serve(work(16, tokens, 0.0, seed))[0]) - began

    # A seed of its own each time: its prompts are in no cache. The first two runs warm up.
    prefill = [seconds(1, seed) for seed in (901, 902, 903, 904)]
    whole = [seconds(MORE, seed) for seed in (905, 906, 907, 908)]
    return min(prefill[2:]), (min(whole[1:]) - min(prefill[2:])) / (MORE - 1)


def times(seen: Sequence[Seen]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    gaps = np.concatenate([np.diff(it.times) for it in seen])
    first = np.array([it.times[0] - it.arrived for it in seen])
    return {
        "itl_p50_ms": round(1e3 * float(np.percentile(gaps, 50)), 2),
        "itl_p99_ms": round(1e3 * float(np.percentile(gaps, 99)), 2),
        "ttft_p50_ms": round(1e3 * float(np.percentile(first, 50)), 1),
        "ttft_p99_ms": round(1e3 * float(np.percentile(first, 99)), 1),
    }


def latency(requests: int) -> dict[str, Any]:
    """The figures of both kinds of fleet, by the ratio of the load, with so many requests a round."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, LARGE)
        (folder / "secret").write_text("a secret of many bytes")
        fleets = {"mixed": Fleet(folder, (None, None)), "pair": Fleet(folder, ("kv_producer", "kv_consumer"))}
        fleets["pair"].serve(work(8, 8, 0.0, 900))  # warms up
        prefill, token = speeds(fleets["mixed"])
        for number, ratio in enumerate(RATIOS):
            tokens = min(max(2, round(prefill / ratio / token) + 1), MOST_TOKENS)
            rate = LOAD * 16 / (prefill + token * (tokens - 1))
            print(f"{ratio:g} : 1: {tokens} tokens, {rate:.2f} requests/s", file=sys.stderr)
            row: dict[str, Any] = {"ratio": ratio, "answer_tokens": tokens, "requests_per_s": round(rate, 2)}
            row |= {"requests": requests * ROUNDS, "pulled": 0}
            seen: dict[str, list[list[Seen]]] = {name: [] for name in fleets}
            for turn in range(ROUNDS):
                for name, fleet in fleets.items():
                    answers, pulls = fleet.serve(work(requests, tokens, rate, ROUNDS * number + turn + 1))
                    seen[name].append(answers)
                    row["pulled"] += pulls
            row |= {name: times([it for one in all_rounds for it in one]) for name, all_rounds in seen.items()}
            row["itl_p99_ratio"] = _ratio(row["pair"], row["mixed"])
            row["itl_p99_ratio_by_round"] = [
                _ratio(times(pair), times(mixed)) for mixed, pair in zip(*seen.values(), strict=True)
            ]
            rows.append(row)
            print(f"{ratio:g} : 1: {row['itl_p99_ratio']:.2f} x", file=sys.stderr)
        for fleet in fleets.values():
            fleet.close()
    return {"prompt_tokens": PROMPT, "chunk_budget": BUDGET, "load": LOAD, "rows": rows}


def _ratio(pair: dict[str, float], mixed: dict[str, float]) -> float:
    return round(pair["itl_p99_ms"] / mixed["itl_p99_ms"], 3)


def show(results: dict[str, Any]) -> None:
    """Prints the tables."""
    console = Console(width=150)
    if (found := results.get("latency")) is not None:
        title = (
            f"prompts of {found['prompt_tokens']} tokens, chunk budget {found['chunk_budget']}, {found['load']:.0%} of capacity"
        )
        times_of = ("ITL p50", "p99", "TTFT p50", "p99 (ms)")
        table = Table("prefill : decode", "answer", "requests/s", "pulled", "fleet", *times_of, "ITL p99 (rounds)", title=title)
        for row in found["rows"]:
            head = f"{row['ratio']:g} : 1", str(row["answer_tokens"]), str(row["requests_per_s"]), ""
            table.add_row(*head, "mixed", *(str(it) for it in row["mixed"].values()), "")
            rounds, pulled = row["itl_p99_ratio_by_round"], f"{row['pulled']} of {row['requests']}"
            ratio = f"{row['itl_p99_ratio']:.2f} x ({min(rounds):.2f} to {max(rounds):.2f})"
            table.add_row("", "", "", pulled, "pair", *(str(it) for it in row["pair"].values()), ratio)
        console.print(table)
        even = next(row["itl_p99_ratio"] for row in found["rows"] if row["ratio"] == 1)
        console.print(f"gate {'met' if even <= GATE else 'missed'}: {even:.2f} x at 1 : 1")
    if (found := results.get("aborts")) is not None:
        table = Table(
            "side", "held", *found["held_after_the_leases"]["prefill"], title=f"{found['pairs']:,} pairs: {found['phases']}"
        )
        for when in ("held_at_the_last_abort", "held_after_the_leases"):
            for side, held in found[when].items():
                table.add_row(side, when.removeprefix("held_").replace("_", " "), *(str(it) for it in held.values()))
        console.print(table)
        left = sum(sum(held.values()) for held in found["held_after_the_leases"].values())
        console.print("gate missed" if left else "gate met")


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run; nothing is written")
    parser.add_argument("--only", choices=["latency", "aborts"], help="one of the two tables (both)")
    given, results = parser.parse_args(), dict[str, Any]()
    torch.set_num_threads(1)
    logging.getLogger("penstock").setLevel(logging.ERROR)  # leases that nobody comes for are meant
    if given.only != "aborts":
        results["latency"] = latency(QUICK_REQUESTS if given.quick else REQUESTS)
    if given.only != "latency":
        results["aborts"] = aborts(QUICK_PAIRS if given.quick else PAIRS)
    show(results)
    if not given.quick:
        print(write_results("disaggregation" if given.only is None else f"disaggregation-{given.only}", results))


if __name__ == "__main__":
    main()
