"""What aborted pairs of a prefill and a decode replica leave behind: blocks, pages, leases and requests that are still held.

    make bench-disaggregation
    make bench-disaggregation ARGS=--quick

Two cores with a small model in one process. One pair in five ends well. The others are aborted at random phases on either side,
or nobody fetches their pages. The gate: when the leases have run out, neither side holds anything.
"""

import argparse
import logging
import tempfile
import time
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

PAIRS, QUICK_PAIRS = 10_000, 500
LEASE_S, PATIENCE_S = 5.0, 120.0
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}


def save_model(folder: Path) -> None:
    """A random Llama in bf16."""
    torch.manual_seed(0)
    rest = {"vocab_size": 8000, "max_position_embeddings": 512, "eos_token_id": None}
    config = transformers.LlamaConfig(num_key_value_heads=SHAPE["num_attention_heads"], **SHAPE, **rest)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Side:
    """A core turned by hand, one half of a pair.

    Args:
        folder: Has the checkpoint and the secret.
        role: As in `--kv-transfer-config`.
    """

    def __init__(self, folder: Path, role: str) -> None:
        [port] = free_ports(1)
        transfer = {"kv_connector": "transfer", "kv_role": role, "kv_port": port}
        transfer["kv_connector_extra_config"] = {"kv_lease_duration": LEASE_S}
        config = EngineArgs(
            model=str(folder),
            device="cpu",
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_memory_bytes=2**28,
            kv_offload_memory_bytes=2**28,
            kv_transfer_config=transfer,
            kv_transfer_secret_file=str(folder / "secret"),
        ).config()
        executor, blocks = build_executor(config)
        self.core = build_core(config, executor, blocks, epoch=1)
        self.transfer = config.transfer
        self.finished: dict[int, Finished] = {}

    def add(self, index: int, prompt: list[int], tokens: int, **more: Any) -> None:
        """A request; the model has no end of its own."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        self.core.handle(AddRequest(index, str(index), prompt, sampling, time.time(), **more))

    def step(self) -> None:
        """One step."""
        for ended in [] if (frame := self.core.step()) is None else frame.finished:
            if ended.error is not None:
                raise RuntimeError(f"a request failed: {ended}")
            self.finished[ended.index] = ended

    @property
    def is_granting(self) -> bool:
        """Whether a lease waits for its pages to be written."""
        offload = self.core._offload  # pyright: ignore
        assert offload is not None and offload.transfer is not None
        return offload.transfer.leases.is_due

    def lent(self, index: int) -> RemotePrefix | None:
        """What the end of a prefill request says to a decode replica."""
        told, it = self.finished.pop(index).lent, self.transfer
        if told is None or it is None:
            return None
        blocks = [len(group) for group in told.blocks]
        return RemotePrefix(told.lease, it.engine_id, it.host, it.port, told.fingerprint, told.num_tokens, blocks, optional=True)

    def held(self) -> dict[str, int]:
        """What is held now: blocks of the KV cache, pages of the host's memory, leases, requests."""
        offload, scheduler = self.core._offload, self.core.scheduler  # pyright: ignore
        assert offload is not None
        pages = len(offload.tier._readers) + len(offload.tier._writing)
        told = self.core.stats().offload
        assert told is not None and told.transfer is not None
        live = scheduler.num_running + sum(scheduler.waiting().values())
        return {"blocks": scheduler.kv.pool.num_used, "pages": pages, "leases": told.transfer.leases, "requests": live}


def aborts(pairs: int) -> dict[str, Any]:
    """Runs pairs of which one in five ends well, and tells what both sides hold when the leases are over."""
    rng = np.random.default_rng(0)
    phases = dict.fromkeys(("prefill", "not fetched", "decode", "whole"), 0)
    with tempfile.TemporaryDirectory() as name, Console(stderr=True).status("pairs") as status:
        folder = Path(name)
        save_model(folder)
        (folder / "secret").write_text("a secret of many bytes")
        sides = {"prefill": Side(folder, "kv_producer"), "decode": Side(folder, "kv_consumer")}
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


def show(found: dict[str, Any]) -> None:
    """Prints the table."""
    held = found["held_after_the_leases"]
    table = Table("side", "held", *held["prefill"], title=f"{found['pairs']:,} pairs: {found['phases']}")
    for when in ("held_at_the_last_abort", "held_after_the_leases"):
        for side, counts in found[when].items():
            table.add_row(side, when.removeprefix("held_").replace("_", " "), *(str(it) for it in counts.values()))
    console = Console(width=100)
    console.print(table)
    console.print("gate missed" if any(sum(counts.values()) for counts in held.values()) else "gate met")


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="500 pairs; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("penstock").setLevel(logging.ERROR)  # leases that nobody comes for are meant
    found = aborts(QUICK_PAIRS if given.quick else PAIRS)
    show(found)
    if not given.quick:
        print(write_results("disaggregation", found))


if __name__ == "__main__":
    main()
