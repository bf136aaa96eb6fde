"""What the runner keeps between calls and steps: no more than it must, and nothing that grows."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.attention.context import ForwardContext
from penstock.engine.core.plan import SampleInputs
from penstock.engine.runner import model_runner
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling import cpu
from penstock.kernels.sampling.ops import CPU

VOCAB = 257
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
RANDOM = SamplingParams(max_tokens=100, temperature=1.0, top_p=0.9, seed=3)
BUSY = SamplingParams(
    max_tokens=100,
    temperature=0.7,
    seed=5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((3, 1.0),),
    bad_words=((1, 2),),
    logprobs=3,
)


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def arrays(root: Any) -> dict[str, tuple[int, int]]:
    """Where each array and tensor that an object reaches lies, and its bytes."""
    found, seen, todo = {}, set(), [("", root)]
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            found[name] = (value.ctypes.data, value.nbytes)
        elif isinstance(value, torch.Tensor):
            found[name] = (0 if value.is_mkldnn else value.data_ptr(), 0 if value.is_mkldnn else value.nbytes)
        elif isinstance(value, dict):
            todo += [(f"{name}.{key}", each) for key, each in value.items()]
        elif isinstance(value, list | tuple):
            todo += [(f"{name}.{at}", each) for at, each in enumerate(value)]
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("penstock"):
            todo += [(f"{name}.{key}", each) for key, each in vars(value).items()]
    return found


def test_a_decode_step_grows_no_buffer(loaded, driver):
    runner = loaded("llama")
    play = driver(runner)
    rows = [play.admit(prompt(at), params) for at, params in enumerate((GREEDY, RANDOM, BUSY))]
    play.step([(row, 20) for row in rows])
    for _ in range(2):
        play.step([(row, 1) for row in rows])
    before = arrays(runner)
    assert len(before) > 40 and any("block_tables" in name for name in before) and any("kv_caches" in name for name in before)
    for _ in range(40):
        play.step([(row, 1) for row in rows])
    assert arrays(runner) == before


@pytest.mark.req("MR-02", "MR-18")
def test_a_steps_state_lives_from_execute_to_sample(loaded, driver, monkeypatch):
    runner, contexts = loaded("llama"), []

    def context(*arguments, **named) -> ForwardContext:
        made = ForwardContext(*arguments, **named)
        contexts.append(weakref.ref(made))
        return made

    monkeypatch.setattr(model_runner, "ForwardContext", context)
    play = driver(runner)
    plan = play.plan([(play.admit(prompt(1)), 20), (play.admit(prompt(2)), 15)])
    assert runner._launched is None
    runner.execute(plan)
    state = runner._launched
    assert isinstance(state, tuple) and state.plan is plan and state.forward.logits.shape == (1, VOCAB)
    assert state.step.inputs.input_ids.tolist() == prompt(1) + prompt(2)[:15] and contexts[0]() is not None
    del state
    runner.sample(SampleInputs(plan.step_id))
    gc.collect()
    assert runner._launched is None and contexts[0]() is None


class Reads(TorchDispatchMode):
    """Counts operations whose result the host must wait for."""

    names = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.unique", "aten.masked_select", "aten.equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(self.names):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_execute_waits_for_no_result(loaded, driver, name):
    runner = loaded(name)
    play = driver(runner)
    play.generate(play.admit(prompt(1)), 2)
    sequence, other = play.admit(prompt(2)), play.admit(prompt(3), RANDOM)
    play.step([(sequence, 20)])
    plan = play.plan([(sequence, 1), (other, 20)])
    with Reads() as reads:
        runner.execute(plan)
    assert reads.found == []
    runner.sample(SampleInputs(plan.step_id))
    with Reads() as reads:
        torch.ones(1).item()
    assert reads.found, "the ledger does see them"


@pytest.mark.req("IB-06")
def test_only_random_rows_are_drawn_for(loaded, driver, monkeypatch):
    """Rows of both kinds come and go."""
    runner, drawn = loaded("llama"), []
    monkeypatch.setattr(runner.sampler, "ops", CPU)
    draw = cpu.draw
    monkeypatch.setattr(cpu, "draw", lambda logits, uniforms: drawn.append(len(logits)) or draw(logits, uniforms))
    play = driver(runner)
    rng, live = np.random.default_rng(0), []
    steps = []
    for step in range(40):
        while len(live) > 2 or (live and rng.random() < 0.5):
            gone = live.pop(int(rng.integers(len(live))))
            play.release(gone)
        while not live or rng.random() < 0.4:
            live.append(play.admit(prompt(step, 4), GREEDY if rng.random() < 0.6 else RANDOM))
        work = [(row, len(row.tokens) - row.computed) for row in live]
        drawn.clear()
        play.step(work)
        random = sum(not row.sampling.greedy for row in live)
        assert drawn == ([random] if random else [])
        steps.append((random, len(live)))
    assert any(not random for random, _ in steps) and any(random == count for random, count in steps)


@pytest.mark.req("SMP-23")
def test_a_result_is_int32_one_column_wide(loaded, driver):
    play = driver(loaded("llama"))
    result = play.step([(play.admit(prompt(at), params), 20) for at, params in enumerate((GREEDY, RANDOM, BUSY))])
    assert (result.token_ids.dtype, result.token_ids.shape) == (np.int32, (3, 1))
    found = result.logprobs
    assert [column.dtype for column in (found.sampled, found.top_logprobs, found.ranks, found.top_ids)] == [
        np.float32,
        np.float32,
        np.int32,
        np.int32,
    ]
    assert found.top_ids.shape == found.top_logprobs.shape == (1, 3)


@pytest.mark.parametrize("name", ["gemma3", "phi3-longrope", "olmo2"])
def test_weights_that_are_changed_on_their_way_in_are_read_again_alike(checkpoint, build_runner, driver, name):
    """Norms with an offset, fused projections, tied embeddings."""
    runner = build_runner(checkpoint(name))
    play = driver(runner)
    expected = play.generate(play.admit(prompt(1)), 4)
    runner.model.norm.weight.fill_(float("nan"))
    runner.reload_weights(None)
    play = driver(runner)
    assert play.generate(play.admit(prompt(1)), 4) == expected
