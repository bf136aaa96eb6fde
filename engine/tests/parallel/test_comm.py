"""What ranks in processes of their own add up and join, and what happens when one of them is gone, stopped or elsewhere."""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import Ranks

from penstock.engine.config import ConfigError
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.gloo_comm import GlooComm
from penstock.engine.parallel.shared_comm import SharedComm
from penstock.engine.parallel.shared_memory import SharedMemory, group_bytes
from penstock.kernels.collective.reference import add_in_order
from penstock.kernels.cpu.tape import Pool
from penstock.kernels.ops import ops_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOT_BYTES = 1 << 12


def partials(world: int, rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of every rank, with numbers that cancel out between the first two, so that another order would give other bits."""
    generator = torch.Generator().manual_seed(world * rows + columns)
    values = torch.randn(world, rows, columns, generator=generator)
    if world > 2:
        values[0, :, ::2], values[1, :, ::2] = 2.0**15, -(2.0**15)
    return list(values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_sum_is_that_in_the_order_of_ranks_and_rounded_once(together, world, dtype):
    given = {rows: partials(world, rows, 515, dtype) for rows in (1, 2, 9)}  # up to five pieces
    found = together(world, lambda comm: [comm.all_reduce(xs[comm.rank]) for xs in given.values()])
    for of_rank in found:
        for result, xs in zip(of_rank, given.values(), strict=True):
            assert torch.equal(result, add_in_order(xs))
    if world > 2:
        xs = given[9]
        assert not torch.equal(add_in_order(xs), add_in_order(xs[::-1])), "these numbers tell no order from another"


@pytest.mark.parametrize("world", [2, 4])
def test_a_rows_bits_do_not_depend_on_the_others(together, world):
    many = partials(world, 33, 640, torch.bfloat16)

    def rows_alone_and_in_a_crowd(comm: SharedComm) -> bool:
        crowd = comm.all_reduce(many[comm.rank])
        return all(torch.equal(comm.all_reduce(many[comm.rank][row : row + 1])[0], crowd[row]) for row in range(33))

    assert together(world, rows_alone_and_in_a_crowd) == [True] * world


def test_half_precision_rounds_as_torch_does(together):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    nothing, factors = torch.zeros_like(every), torch.linspace(0.0, 7e4, 1 << 16).half()
    found = together(
        2, lambda comm: [comm.all_reduce(xs[comm.rank]) for xs in ((every, nothing), (every, factors), (every, every))]
    )
    for of_rank in found:
        for result, other in zip(of_rank, (nothing, factors, every), strict=True):
            expected = add_in_order([every, other])
            assert torch.equal(result.isnan(), expected.isnan())
            assert torch.equal(result.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_columns_stand_in_the_order_of_ranks(together, world):
    parts = [torch.randn(7, 1037) for _ in range(world)]  # a row is longer than a piece
    short = [torch.randn(64, 3) for _ in range(world)]
    found = together(world, lambda comm: [comm.all_gather(xs[comm.rank]) for xs in (parts, short)])
    for wide, narrow in found:
        assert torch.equal(wide, torch.cat(parts, -1)) and torch.equal(narrow, torch.cat(short, -1))


def test_a_blob_comes_from_its_root(together):
    blob = os.urandom(3 * SLOT_BYTES + 5)
    found = together(3, lambda comm: [comm.broadcast(data if comm.rank == 1 else None, 1) for data in (blob, b"", b"x")])
    assert found == [[blob, b"", b"x"]] * 3


def test_nobody_leaves_a_barrier_before_all_have_come(together):
    def arrivals(comm: SharedComm) -> tuple[float, float]:
        time.sleep(0.05 * comm.rank)
        came = time.monotonic()
        comm.barrier()
        return came, time.monotonic()

    found = together(3, arrivals)
    assert min(left for _, left in found) >= max(came for came, _ in found)


def caught(call: Callable[[], Any]) -> str:
    """What the group's failure says."""
    with pytest.raises(GroupFailed) as error:
        call()
    return str(error.value)


def test_ranks_that_disagree_about_a_message_both_say_so(together):
    found = together(2, lambda comm: caught(lambda: comm.all_reduce(torch.zeros(4 + comm.rank, 4, dtype=torch.bfloat16))))
    assert found[0] == "rank 1 and rank 0 disagree: all-reduce of bfloat16, 40 bytes there, all-reduce of bfloat16, 32 bytes here"
    assert found[1] == "rank 0 and rank 1 disagree: all-reduce of bfloat16, 32 bytes there, all-reduce of bfloat16, 40 bytes here"
    kinds = together(2, lambda comm: caught(comm.barrier if comm.rank else lambda: comm.all_gather(torch.zeros(2, 2))))
    assert "barrier" in kinds[0] and "all-gather of float32, 16 bytes" in kinds[1]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_does_not_come_is_named_by_the_deadline(collectives, eventually, signal_number):
    memory, patience = SharedMemory.create(3, SLOT_BYTES), 0.4

    def life(rank: int) -> tuple[str, float, str]:
        comm = SharedComm(memory, rank, collectives, patience)
        x = torch.ones(2, 8)
        comm.all_reduce(x)
        while rank == 1:
            time.sleep(0.01)  # it is elsewhere
        began = time.monotonic()
        told = caught(lambda: [comm.all_reduce(x) for _ in range(2)])
        took = time.monotonic() - began
        return told, took, caught(lambda: comm.all_reduce(x))

    ranks = Ranks(3, life)
    eventually(lambda: memory.progress()[1].calls == 1)
    os.kill(ranks.pids[1], signal_number)
    if signal_number == signal.SIGSTOP:
        eventually(lambda: memory.progress()[0].calls > 1 and memory.progress()[2].calls > 1)
        time.sleep(3 * patience)
        os.kill(ranks.pids[1], signal.SIGKILL)
    first, _, last = ranks.results()
    for told, took, again in (first, last):
        assert told in (f"rank 1 has kept rank {of} waiting for 0.4 seconds" for of in (0, 2)) or told == "rank 1 has failed"
        assert took < 20 * patience
        assert "rank 1" in again, "a group that has failed stays so"
    memory.close()


def test_ranks_are_told_of_a_death_long_before_the_deadline(collectives, eventually):
    memory = SharedMemory.create(3, SLOT_BYTES)

    def life(rank: int) -> str:
        comm = SharedComm(memory, rank, collectives, timeout=600.0)
        return caught(comm.barrier) if rank != 2 else ""

    ranks = Ranks(3, life)
    eventually(lambda: all(progress.calls for progress in memory.progress()[:2]))
    memory.fail(2)
    assert ranks.results() == ["rank 2 has failed", "rank 2 has failed", ""]
    memory.close()


def test_a_rank_that_gives_up_tells_the_others(together):
    def life(comm: SharedComm) -> str:
        if comm.rank == 0:
            comm.fail()
            return ""
        return caught(comm.barrier)

    assert together(3, life, timeout=600.0) == ["", "rank 0 has failed", "rank 0 has failed"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tape_exchanges_too_and_what_goes_wrong_in_it_is_found(dtype):
    ops, memory = ops_for("cpu", dtype), SharedMemory.create(2, SLOT_BYTES)

    def life(rank: int) -> tuple[list[torch.Tensor], str]:
        assert ops.collectives is not None and ops.tape is not None
        comm = SharedComm(memory, rank, ops.collectives, timeout=0.5)
        x = torch.zeros(3, 40, dtype=dtype)
        tape = ops.tape(lambda: comm.all_gather(ops.silu_mul(comm.all_reduce(x))), Pool())
        results = list[torch.Tensor]()
        for number in range(5):
            x.fill_(number + rank)
            results.append(tape.run().clone())
            comm.check()
        if rank == 1:
            return results, ""
        tape.run()
        return results, caught(comm.check)

    (first, told), (second, _) = Ranks(2, life).results()
    for number, pair in enumerate(zip(first, second, strict=True)):
        total = torch.full((3, 40), 2 * number + 1, dtype=dtype)
        expected = ops.silu_mul(total)
        assert all(torch.equal(one, torch.cat([expected, expected], -1)) for one in pair)
    assert told == "rank 1 has kept rank 0 waiting for 0.5 seconds"
    memory.close()


def test_memory_that_is_not_there_is_refused_with_its_size(collectives):
    def life(_: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        with pytest.raises(ConfigError) as error:
            SharedMemory.create(4)
        return str(error.value)

    [told] = Ranks(1, life).results()
    assert told == f"4 ranks need {group_bytes(4):,} bytes of shared memory: File too large"


@pytest.mark.slow
def test_nothing_is_left_behind_by_many_groups(collectives):
    def left() -> tuple[int, set[str], set[str]]:
        # Other tests in this process may have children that go on: what tracks the resources of processes, say.
        children = {pid for told in Path("/proc/self/task").glob("*/children") for pid in told.read_text().split()}
        return len(list(Path("/proc/self/fd").iterdir())), {path.name for path in Path("/dev/shm").glob("*penstock*")}, children

    before = left()
    for number in range(24):
        memory = SharedMemory.create(2, SLOT_BYTES)

        def life(rank: int, memory: SharedMemory = memory) -> float:
            return SharedComm(memory, rank, collectives, 60.0).all_reduce(torch.ones(2)).sum().item()

        ranks = Ranks(2, life)
        if number % 4 == 3:
            os.kill(ranks.pids[0], signal.SIGKILL)
            memory.fail(0)
        else:
            assert ranks.results() == [4.0, 4.0]
        memory.close()
        if number % 4 == 3:
            ranks.results()
    assert left() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_gloo_gives_the_bits_of_shared_memory(together, tmp_path, dtype):
    given = [partials(3, rows, 257, dtype) for rows in (1, 17)]

    def results(comm: Any) -> list[torch.Tensor]:
        return [exchange(xs[comm.rank]) for xs in given for exchange in (comm.all_reduce, comm.all_gather)]

    shared, meeting = together(3, results), f"file://{tmp_path}/meeting"
    gloo = Ranks(3, lambda rank: results(GlooComm(meeting, rank, 3, 30.0))).results()
    for ours, theirs in zip(shared, gloo, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_gloo_notices_a_rank_that_has_gone(tmp_path):
    def life(rank: int) -> str:
        comm = GlooComm(f"file://{tmp_path}/meeting", rank, 2, 5.0)
        comm.all_reduce(torch.ones(2))
        if rank == 1:
            os._exit(0)
        return caught(lambda: comm.all_reduce(torch.ones(2)))

    told, _ = Ranks(2, life).results()
    assert told.startswith("rank 0 could not exchange with the others: ")


def test_a_network_interface_that_does_not_exist_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")

    def life(rank: int) -> str:
        return caught(lambda: GlooComm(f"file://{tmp_path}/meeting", rank, 2, 5.0))

    for rank, told in enumerate(Ranks(2, life).results()):
        assert told.startswith(f"rank {rank} has not found the other 1 at ") and "nowhere0" in told


def test_a_group_that_never_meets_is_an_error_by_name(tmp_path):
    def life(rank: int) -> str:
        return caught(lambda: GlooComm(f"file://{tmp_path}/meeting", rank, 2, 0.5))

    assert Ranks(1, life).results()[0].startswith(f"rank 0 has not found the other 1 at file://{tmp_path}/meeting: ")
