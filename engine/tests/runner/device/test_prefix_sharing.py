"""Decodes that read the prefix of all of them apart: which steps do, and that their tokens are those of others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from device_runners import FORMS
from recording_graphs import RecordingGraphs
from test_device_runner import VOCAB, Engine

from penstock.engine.attention.backends.torch import TorchBackend
from penstock.engine.config import GraphConfig, SchedulerConfig
from penstock.engine.messages import AddRequest
from penstock.engine.runner.device import shared_prefix
from penstock.engine.runner.device.graphs import dispatcher as reasons
from penstock.engine.runner.device.shared_prefix import shared_blocks, shared_tokens
from penstock.engine.sampling import SamplingParams
from penstock.kernels.paged_attention.device_reference import paged_attention_device

ROWS = np.array([2, 0, 3], np.int32)


def table(*lengths: int) -> np.ndarray:
    """Rows that are the same for so many blocks, and differ from there on."""
    found = np.tile(np.arange(1, 101, dtype=np.int32), (len(lengths), 1))
    for row, length in enumerate(lengths):
        found[row, length:] += 1000 * (row + 1)
    return found


@pytest.mark.req("SCH-27")
def test_a_prefix_is_as_long_as_all_rows_share_it():
    """A system prompt of all gives its blocks, and one request without it gives none."""
    assert shared_blocks(table(90, 0, 90, 41), ROWS, 100) == 41
    assert shared_blocks(table(90, 0, 90, 7), ROWS, 100) == 7
    assert shared_blocks(table(90, 0, 90, 41), np.array([0, 1], np.int32), 100) == 0
    assert shared_blocks(table(90, 0, 90, 90), ROWS, 33) == 33


def test_only_whole_steps_of_tokens_count_whose_keys_are_there():
    settled = np.array([700, 5, 700, 700], np.int32)
    assert shared_tokens(table(90, 0, 90, 41), ROWS, settled, 16) == 640, "of 656"
    settled[3] = 383
    assert shared_tokens(table(90, 0, 90, 41), ROWS, settled, 16) == 256, "of 368 in whole blocks"
    assert shared_tokens(table(90, 0, 90, 41), ROWS[:1], settled, 16) == 0


class Attention:
    """Reads the first request's blocks for all, as far as the batch says so."""

    def __init__(self):
        self.tokens = set()
        """How many were said."""

    def attend(self, q, kv_cache, batch, *given, **options):
        if batch.shared is not None:
            self.tokens.add(int(batch.shared))
            rows = batch.block_table[batch.rows]
            blocks = torch.arange(rows.shape[1]) < batch.shared // batch.block_size
            rows = torch.where(blocks, rows[:1], rows)
            batch = replace(batch, block_table=rows, rows=torch.arange(len(rows), dtype=torch.int32), shared=None)
        return paged_attention_device(q, kv_cache, batch, *given, **options)


@pytest.fixture
def sharing(monkeypatch):
    """Prefixes are shared in steps of a block, however little it saves."""
    monkeypatch.setattr(TorchBackend, "shares", True)
    monkeypatch.setattr(shared_prefix, "SHARED_STEP", 16)
    monkeypatch.setattr(shared_prefix, "pays", lambda shape, token_bytes, requests, shared: True)
    return Attention()


def batch(first: int, count: int, prompt: list[int], **sampling) -> list[AddRequest]:
    """Requests that begin alike and go on differently, with outputs of different lengths."""
    return [
        AddRequest(i, f"r{i}", [*prompt, i, i + 1], SamplingParams(max_tokens=6 + i, temperature=0.0, **sampling), float(i))
        for i in range(first, first + count)
    ]


@pytest.mark.slow
@pytest.mark.req("LIM-17")
def test_a_captured_step_reads_a_shared_prefix_once_and_gives_the_same_tokens(checkpoint, build_device_runner, sharing):
    """Then an outsider comes, and nothing is shared while it is there."""
    path, scheduler = checkpoint("llama"), SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    prompt = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    rounds = [batch(0, 1, prompt), batch(1, 4, prompt), [*batch(5, 2, prompt), *batch(7, 1, prompt[::-1])]]
    expected = Engine(build_device_runner(path, scheduler=scheduler), 2, 100)
    graphs = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 4, 8, 64))
    forms = FORMS._replace(model=replace(FORMS.model, paged_attention=sharing.attend))
    runner = build_device_runner(path, scheduler=scheduler, forms=forms, recording=RecordingGraphs(), graphs=graphs)
    found = Engine(runner, 2, 100)
    while runner.graphs.capture_next():
        pass
    shared = []
    for requests in rounds:
        assert found.run(requests) == expected.run(requests)
        steps = {graph.reason: graph.steps for graph in found.core.stats().step.graphs}
        shared.append(steps.get(reasons.SHARED_PREFIX, 0))
    assert shared[0] == 0 and shared[1] >= 6 and shared[2] == shared[1], "one alone, four, and an outsider among them"
    assert sharing.tokens == {0, 32}, "0 where a graph is captured, then two blocks of the 40 tokens"
    assert runner.graphs.report().failed == 0
