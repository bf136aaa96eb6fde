"""What a step takes beside weights and cache."""

import subprocess
import sys

import pytest
import torch

from penstock.engine.runner.memory_profile import PROFILE_TOKENS, PeakMemory, peak_activation_bytes


def test_the_peak_counts_what_lives_together_and_views_once():
    weight = torch.ones(1000)
    with PeakMemory() as memory:
        first = weight + 1  # 4,000 bytes
        view = first[10:20].view(2, 5)
        del first
        second = weight.double()  # 8,000 while a view holds the first
        del view
        third = second[:1] + 1
        del second, third
        weight.add_(1)
        for _ in range(5):
            weight * 2  # each is gone before the next
    assert memory.peak == 12_000


@pytest.mark.parametrize(("max_tokens", "max_rows"), [(10, 3), (PROFILE_TOKENS, PROFILE_TOKENS), (5000, 300), (2048, 1)])
def test_small_steps_tell_of_large_ones(max_tokens, max_rows):
    largest = 0

    def step(tokens, rows):
        nonlocal largest
        largest = max(largest, tokens)
        hidden = torch.ones(tokens, 100)
        torch.ones(rows, 1000) * hidden.sum()

    found = peak_activation_bytes(step, max_tokens, max_rows)
    exact = 4 * (max_tokens * 100 + 2 * max_rows * 1000)
    assert largest <= PROFILE_TOKENS
    assert exact <= found <= exact + 4 * (100 * max_rows + 2000) + 100


@pytest.mark.req("MEM-02")
def test_a_real_step_takes_no_more_than_was_foretold(build_runner, checkpoint):
    runner = build_runner(checkpoint("llama"), "float32")
    scheduler = runner.config.scheduler
    foretold = runner.profile_memory()
    for tokens, rows in ((scheduler.max_num_batched_tokens, scheduler.max_num_seqs), (scheduler.max_num_batched_tokens, 1)):
        with PeakMemory() as memory:
            runner._dummy_step(tokens, rows)
        assert memory.peak <= foretold
        assert rows == 1 or memory.peak > foretold / 2


@pytest.mark.slow
def test_a_start_does_not_import_torchs_compiler(checkpoint):
    script = """
import sys
from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_executor
build_executor(EngineArgs(model=sys.argv[1], kv_cache_memory_bytes=2**22).config(), sys.argv[2])
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    runner = "penstock.engine.runner.model_runner:ModelRunner"
    ran = subprocess.run([sys.executable, "-c", script, str(checkpoint("llama")), runner], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr
