"""Tapes: what was recorded happens again with whatever lies in the inputs by then."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from penstock.kernels.cpu.tape import NotTapeable, Pool
from penstock.kernels.lora.batch import LoraBatch
from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
HIDDEN = HEADS * SIZE


class Step:
    """A decode step of two rows with every native operation in it, and some of torch's."""

    def __init__(self, ops, dtype):
        self.ops, generator = ops, torch.Generator().manual_seed(0)
        random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.table = random(50, HIDDEN).to(dtype)
        self.norm, self.norms = random(HIDDEN), QKNorm(random(SIZE), random(SIZE), 1e-5)
        self.qkv = random((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN).to(dtype)
        self.shelves = ops.lora_shelves(2, 5, HIDDEN, [(0, HIDDEN), (HIDDEN, KV_HEADS * SIZE)], dtype, torch.device("cpu"))
        for shelf, size in zip(self.shelves, (HIDDEN, KV_HEADS * SIZE), strict=True):
            for slot in range(2):
                shelf.put(slot, random(3 + slot, HIDDEN), random(size, 3 + slot))
        self.lora = LoraBatch(2, 2)
        self.angles = Rotary(random(2, SIZE // 2), random(2, SIZE // 2))
        self.ids, self.slots = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self.lens, self.blocks = np.zeros(2, np.int32), np.zeros((2, 4), np.int32)
        self.cache = torch.zeros(9, 2, KV_HEADS, BLOCK, SIZE, dtype=dtype)

    def set(self, position):
        """The inputs of a step at this position of both rows."""
        self.ids[:] = position % 50, (7 * position + 3) % 50
        self.blocks[:] = [[1, 2, 3, 4], [8, 7, 6, 5]]
        self.lens[:] = position + 1
        self.lora.fill(np.array([position % 3 - 1, position // 3 % 3 - 1]))
        self.slots[:] = self.blocks[:, position // BLOCK] * BLOCK + position % BLOCK

    def __call__(self):
        ops = self.ops
        hidden = self.table.index_select(0, torch.from_numpy(self.ids)) * 0.5
        normed, total = ops.add_rms_norm(ops.rms_norm(hidden, self.norm, 1e-6), hidden, self.norm, 1e-6)
        qkv = torch.nn.functional.linear(normed, self.qkv)
        ops.add_lora(qkv, normed, self.shelves, self.lora)
        q, k, v = qkv.split([HIDDEN, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
        q, k, v = (x.view(2, -1, SIZE) for x in (q, k, v))
        q = ops.prepare_kv(q, k, v, self.cache, torch.from_numpy(self.slots), self.angles, self.norms)
        batch = PagedBatch(BLOCK, np.arange(3, dtype=np.int32), self.lens, self.blocks)
        out = ops.paged_attention(q, self.cache, batch, 0.2).flatten(1)
        out = torch.cat([ops.silu_mul(torch.cat([out, total], 1)), ops.gelu_tanh_mul(torch.cat([total, out], 1))], 1)
        return (out + 1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tape_does_what_its_function_does(native, dtype):
    ops = native(dtype)
    step, again = Step(ops, dtype), Step(ops, dtype)
    step.batch = step.set(0), again.set(0)
    tape = ops.tape(step, Pool())
    assert torch.equal(tape.result, again())
    for position in range(1, 50):
        step.set(position), again.set(position)
        assert torch.equal(tape.run(), again()), position
    assert torch.equal(step.cache, again.cache)


def test_operations_run_as_ever_after_a_recording(native):
    ops = native(torch.float32)
    x, weight = torch.randn(3, 16), torch.randn(16)
    before = ops.rms_norm(x, weight, 1e-6)
    tape = ops.tape(lambda: ops.rms_norm(x, weight, 1e-6), Pool())
    with pytest.raises(RuntimeError, match="half way"):
        ops.tape(_broken, Pool())
    x += 1
    assert not torch.equal(ops.rms_norm(x, weight, 1e-6), before)
    assert torch.equal(tape.result, before), "only `run` writes the result anew"
    assert torch.equal(tape.run(), ops.rms_norm(x, weight, 1e-6))


def _broken() -> torch.Tensor:
    raise RuntimeError("half way")


def test_a_pool_gives_memory_again_when_no_view_of_it_is_left():
    pool, like = Pool(), torch.empty(4, 8)
    first = pool.empty_like(like)
    rows = first.view(8, 4)[1:]
    rows.fill_(1.0)
    at = first.data_ptr()
    del first
    other = pool.empty_like(like)
    assert other.data_ptr() != at, "a view of the first is in use"
    other.fill_(2.0)
    assert bool((rows == 1.0).all())
    del rows
    assert pool.empty_like(torch.empty(2, 2, dtype=torch.bfloat16)).data_ptr() == at


def test_two_tapes_may_share_a_pool(native):
    ops, pool = native(torch.float32), Pool()
    x, weight = torch.randn(3, 16), torch.ones(16)
    one = ops.tape(lambda: ops.rms_norm(ops.rms_norm(x, weight, 1e-6) + 1, weight, 1e-6), pool)
    two = ops.tape(lambda: ops.rms_norm(ops.rms_norm(x[:2], weight, 1e-6) + 2, weight, 1e-6), pool)
    for _ in range(2):
        x.normal_()
        for tape, rows, add in ((one, 3, 1), (two, 2, 2)):
            assert torch.equal(tape.run(), ops.rms_norm(ops.rms_norm(x[:rows], weight, 1e-6) + add, weight, 1e-6))


def test_tapes_of_many_sizes_take_the_memory_of_few(native):
    """One a number of rows: each with its own intermediate tensors and result, they would take half of all sizes' sum."""
    ops, pool, weight = native(torch.float32), Pool(), torch.randn(4096, 16)
    for rows in range(1, 33):
        x = torch.randn(rows, 16)

        def run(x: torch.Tensor = x) -> torch.Tensor:
            for _ in range(10):
                wide = torch.nn.functional.linear(ops.rms_norm(x, torch.ones(16), 1e-6), weight) + 1
                x = wide[:, :16].contiguous()
            return wide.float() + 1

        tape = ops.tape(run, pool)
        assert torch.equal(tape.run(), run())
    assert pool.nbytes < 10 * 32 * 4096 * 4


def test_what_no_tape_can_do_again_is_refused_by_name(native):
    ops, x = native(torch.float32), torch.randn(3, 16)
    with pytest.raises(NotTapeable, match="topk"):
        ops.tape(lambda: ops.rms_norm(x, torch.ones(16), 1e-6).topk(2).values, Pool())


QUESTIONS = {
    "__bool__": lambda x: x * 2 if bool(x[0, 0] > 0) else x * 3,
    "item": lambda x: x * x[0, 0].item(),
    "__float__": lambda x: x * float(x[0, 0]),
    "tolist": lambda x: x * x[0].tolist()[0],
    "numpy": lambda x: x * float(x.numpy()[0, 0]),
    "equal": lambda x: x * 2 if torch.equal(x, x.abs()) else x,
    "nonzero": lambda x: (x > 0).nonzero() * 2,
    "masked_select": lambda x: x.masked_select(x > 0) * 2,
    "__getitem__": lambda x: x[x > 0] * 2,
    "unique": lambda x: x.unique() * 2,
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", QUESTIONS)
def test_what_depends_on_the_values_of_the_recorded_run_is_refused_by_name(native, name, inference):
    ops, x = native(torch.float32), torch.randn(3, 16)
    with torch.inference_mode(inference), pytest.raises(NotTapeable, match=f"{name}.* asks what a tensor holds"):
        ops.tape(lambda: QUESTIONS[name](ops.rms_norm(x, torch.ones(16), 1e-6)), Pool())


def test_a_choice_of_rows_by_number_is_taped(native):
    ops, x, at = native(torch.float32), torch.randn(4, 16), torch.tensor([3, 0])
    tape = ops.tape(lambda: ops.rms_norm(x, torch.ones(16), 1e-6)[at] * 2, Pool())
    x.normal_()
    at[0] = 1
    assert torch.equal(tape.run(), ops.rms_norm(x, torch.ones(16), 1e-6)[at] * 2)


@pytest.mark.slow
def test_a_recording_does_not_import_torchs_compiler():
    """It takes seconds and hundreds of megabytes, and the first recording is in a client's first request."""
    program = """
import sys, torch
from penstock.kernels.cpu.tape import Pool
from penstock.kernels.ops import ops_for
ops, x = ops_for("cpu", torch.float32), torch.randn(3, 16)
assert ops.tape is not None, "no compiler on this machine"
ops.tape(lambda: ops.rms_norm(x, torch.ones(16), 1e-6) * 2, Pool())
print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stdout + ran.stderr
