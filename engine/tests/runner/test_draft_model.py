"""A draft model beside its target: it changes no answer, and where it is the target itself every draft is accepted."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from test_core_with_runner import SCHEDULER, Engine, requests
from test_drafts_in_core import K, Watched

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError, SpeculativeConfig
from penstock.engine.runner import own_drafts
from penstock.engine.runner.draft_model import DraftModel
from penstock.engine.spec.costs import StepCosts, Timing
from penstock.engine.spec.depth import DraftDepth
from penstock.kernels.cpu.tape import Tape

FREE = [Timing(1, 0, 1e9), Timing(1, K, 1.0)]
DEAR = [Timing(1, 0, 1e-9), Timing(1, K, 1e9)]


def drafts_pay(monkeypatch, timings=FREE):
    """Drafts cost what these say, whatever steps take: unless told otherwise, nothing."""
    monkeypatch.setattr(own_drafts, "measure_steps", lambda *_: timings)
    for learns in ("observe_step", "followed"):
        monkeypatch.setattr(DraftDepth, learns, lambda *_: None)


def drafting(checkpoint, build_runner, monkeypatch, target, draft, depth=1, num_blocks=100, **pay):
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K, num_lookahead_tokens=K)
    speculative = SpeculativeConfig(method="draft_model", num_speculative_tokens=K, model=checkpoint(draft))
    runner = build_runner(checkpoint(target), scheduler=scheduler, speculative=speculative)
    drafts_pay(monkeypatch, **pay)
    return Watched(runner, depth, num_blocks)


@pytest.fixture(scope="module")
def alone(checkpoint, build_runner):
    """What a target says of each request alone, without drafts."""
    known: dict[tuple[str, bool], dict[int, list[int]]] = {}

    def answers(target: str, adjusted: bool):
        if (target, adjusted) not in known:
            runner, tokens = build_runner(checkpoint(target), scheduler=SCHEDULER), {}
            for request in requests(adjusted):
                tokens |= Engine(runner, depth=1, num_blocks=300).run([request])
            known[target, adjusted] = tokens
        return known[target, adjusted]

    return answers


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("crowded", [False, True], ids=["room", "crowded"])
@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
@pytest.mark.parametrize("draft", ["llama", "qwen3"])
def test_a_draft_model_changes_no_token(checkpoint, build_runner, monkeypatch, alone, draft, adjusted, crowded, depth):
    num_blocks = {"llama": 22, "qwen3": 34}[draft] if crowded else 100  # qwen3 has layers of another size, and two groups
    engine = drafting(checkpoint, build_runner, monkeypatch, "llama", draft, depth, num_blocks)
    try:
        assert engine.run(requests(adjusted)) == alone("llama", adjusted)
        assert engine.drafted > 100
        assert (engine.core.stats().preemptions > 0) == crowded
    finally:
        engine.executor.close()


def greedy():
    return [it for it in requests(False) if it.sampling.temperature == 0.0]


@pytest.mark.parametrize(("target", "num_blocks"), [("llama", 100), ("llama", 22), ("qwen3-windows", 200), ("gemma3", 200)])
def test_the_target_as_its_own_draft_model_is_always_right(checkpoint, build_runner, monkeypatch, alone, target, num_blocks):
    """Through chunks, prefix hits and preemptions: a single key or value in a wrong place would cost a draft."""
    engine = drafting(checkpoint, build_runner, monkeypatch, target, target, num_blocks=num_blocks)
    batch = greedy()
    assert engine.run(batch) == {it.index: alone(target, False)[it.index] for it in batch}
    assert engine.core.scheduler.totals.prefix_hits > 0
    assert engine.drafted > 50 and engine.accepted == engine.drafted


def test_what_rests_keeps_the_cache_right(checkpoint, build_runner, monkeypatch, alone):
    """Requests that were computed while no draft paid leave a prefix that the draft model can go on from."""
    engine = drafting(checkpoint, build_runner, monkeypatch, "llama", "llama", timings=DEAR)
    batch = greedy()
    engine.run(batch)
    assert engine.drafted == 0
    own = engine.runner._own_drafts
    assert own is not None
    own._depth.costs = StepCosts(len(own.drafts), own._depth.depths, FREE)  # from now on drafts are free
    again = [msgspec.structs.replace(it, index=it.index + 100, request_id=f"again-{it.index}") for it in batch]
    hits = engine.core.scheduler.totals.prefix_hits
    answers = engine.run(again)
    assert answers == {it.index + 100: alone("llama", False)[it.index] for it in batch}
    assert engine.core.scheduler.totals.prefix_hits - hits > 200
    assert engine.drafted > 20 and engine.accepted == engine.drafted


def whole_blocks():
    """Six greedy requests whose prompts end where a block does: there is no room for what would be drafted then."""
    batch = [it for it in requests(False) if len(it.prompt_token_ids) >= 64][:6]
    sampling = msgspec.structs.replace(batch[0].sampling, temperature=0.0)
    return [msgspec.structs.replace(it, prompt_token_ids=it.prompt_token_ids[-64:], sampling=sampling) for it in batch]


def test_rows_without_room_for_drafts_do_not_fall_behind(checkpoint, build_runner, monkeypatch):
    engine = drafting(checkpoint, build_runner, monkeypatch, "llama", "llama")
    behind, propose = [], DraftModel.propose

    def watched(model, table, rows, known, most):
        found = propose(model, table, rows, known, most)
        behind.append(int((table.num_computed[rows] - model._computed[rows]).max()))
        return found

    monkeypatch.setattr(DraftModel, "propose", watched)
    engine.run(whole_blocks())
    assert len(behind) > 10 and max(behind) <= 0
    # Next to rows that have drafts they verify a guess once.
    assert engine.drafted - engine.accepted <= len(whole_blocks()) * K < engine.accepted


def test_rows_that_are_far_behind_are_read_in_several_passes(checkpoint, build_runner, monkeypatch, caplog):
    engine = drafting(checkpoint, build_runner, monkeypatch, "llama", "llama")
    follow, steps = DraftModel.follow, iter(range(1000))
    monkeypatch.setattr(DraftModel, "follow", lambda *given: None if next(steps) < 10 else follow(*given))
    propose = DraftModel.propose
    monkeypatch.setattr(DraftModel, "propose", lambda *given: _no_drafts(*given) if next(steps) < 20 else propose(*given))
    engine.run(whole_blocks())
    assert "the proposer failed" not in caplog.text
    assert engine.accepted == engine.drafted > 20


def _no_drafts(model, table, rows, known, most):
    return np.full((len(rows), K), -1, np.int32)


def test_a_draft_model_runs_from_tapes(checkpoint, build_runner, monkeypatch):
    engine = drafting(checkpoint, build_runner, monkeypatch, "llama", "llama")
    if engine.runner.ops.tape is None:
        pytest.skip("no tapes without compiled kernels")
    ran = []
    run = Tape.run
    monkeypatch.setattr(Tape, "run", lambda tape: ran.append(tape) or run(tape))
    engine.run(greedy()[:2])
    tapes = engine.runner._proposer._bound.tapes._tapes
    assert sum(tape in ran for tape in tapes.values() if tape is not None) >= 2, tapes.keys()


def test_it_sleeps_and_wakes_with_the_model(checkpoint, build_runner, monkeypatch, alone):
    engine = drafting(checkpoint, build_runner, monkeypatch, "llama", "llama")
    runner, batch = engine.runner, greedy()
    engine.run(batch)
    runner.sleep(2)
    assert not hasattr(runner, "draft_model") and runner._proposer._bound is None
    runner.wake_up(("weights", "kv_cache"))
    runner.reload_weights(None)
    engine.core.scheduler.kv.reset()
    engine.accepted = engine.drafted = 0
    again = [msgspec.structs.replace(it, index=it.index + 100, request_id=f"again-{it.index}") for it in batch]
    assert engine.run(again) == {it.index + 100: alone("llama", False)[it.index] for it in batch}
    assert engine.drafted > 50 and engine.accepted == engine.drafted


@pytest.mark.req("SD-17")
def test_another_vocabulary_is_refused(checkpoint, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    config = json.loads((checkpoint("llama") / "config.json").read_text()) | {"vocab_size": 300}
    (draft / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint("llama") / "model.safetensors", draft)
    args = EngineArgs(model=str(checkpoint("llama")), device="cpu", spec_model=str(draft))
    with pytest.raises(ConfigError, match="vocab_size is 300, and the model's is 257"):
        args.config()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield
