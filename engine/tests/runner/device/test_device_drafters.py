"""Draft models and heads on a device: the same proposers as on a CPU, whose passes, caches and states are there. They change no
token, and draft what they draft on a CPU."""

import json

import msgspec
import numpy as np
import pytest
import torch
from draft_heads import ReferenceHead, Told, save_head
from test_core_with_runner import Engine, requests
from test_device_proposes import DEAR, Drafting
from test_draft_heads import head  # noqa: F401 (a fixture)
from test_draft_model import alone as alone_of  # noqa: F401 (a fixture)
from test_draft_model import drafts_pay, greedy
from test_drafts_in_core import K

from penstock.engine.config import GraphConfig, SpeculativeConfig
from penstock.engine.runner.draft_sampler import DraftSampler

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


def drafting(build, path, draft, method="draft_model", num_blocks=100, draws="greedy", **kwargs) -> Drafting:
    config = SpeculativeConfig(method=method, num_speculative_tokens=K, model=draft, draft_sample_method=draws)
    return Drafting(build, path, 1, num_blocks, config, lookahead=K, **kwargs)


def method_of(folder) -> str:
    return "eagle3" if json.loads((folder / "config.json").read_text()).get("draft_vocab_size") else "eagle"


def test_the_target_as_its_own_draft_model_is_always_right(checkpoint, build_device_runner, alone_of):  # noqa: F811
    """Through chunks and prefix hits: a key or value in a wrong place would cost a draft."""
    engine = drafting(build_device_runner, checkpoint("llama"), checkpoint("llama"))
    batch = greedy()
    assert engine.run(batch) == {it.index: alone_of("llama", False)[it.index] for it in batch}
    assert engine.counts["drafted"] > 50 and engine.counts["accepted"] == engine.counts["drafted"]
    assert engine.core.scheduler.totals.prefix_hits > 0


def test_another_draft_model_changes_no_token(checkpoint, build_device_runner, alone_of):  # noqa: F811
    """Through preemptions; it has layers of another size than the model, and two groups."""
    engine = drafting(build_device_runner, checkpoint("llama"), checkpoint("qwen3"), num_blocks=34)
    assert engine.run(requests(True)) == alone_of("llama", True)
    assert engine.counts["drafted"] > 100 and engine.core.stats().preemptions > 0


def test_a_head_drafts_what_plain_torch_does(
    checkpoint,
    build_device_runner,
    monkeypatch,
    alone_of,  # noqa: F811
    head,  # noqa: F811
):
    """With graphs, which leave the states where the head finds them, and without graphs through preemptions. Of requests with a
    common prefix one alone."""
    reference, folder = head
    num_blocks, mode = (22, "NONE") if method_of(folder) == "eagle" else (100, "FULL_AND_PIECEWISE")
    batch = [it for it in requests(False) if it.index % 3 == 0 or it.index == 1]
    target = transformers.LlamaForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).eval()
    told = Told(monkeypatch)
    graphs = GraphConfig(mode=mode, capture_sizes=(1, 2, 4, 8, 16, 32, 48))
    engine = drafting(build_device_runner, checkpoint("llama"), folder, method_of(folder), num_blocks, graphs=graphs)
    modes, execute = set(), engine.runner._begin
    engine.runner._begin = lambda *given: (step := execute(*given), modes.add(step.found.mode.value))[0]
    told.seen.clear()
    assert engine.run(batch) == {it.index: alone_of("llama", False)[it.index] for it in batch}
    assert (engine.core.stats().preemptions > 0) == (num_blocks == 22)
    assert (modes == {"NONE"}) == (mode == "NONE"), "no step ran from a graph"
    told.compare(reference, target)


def test_drawn_drafts_are_those_of_a_cpu(checkpoint, build_device_runner, build_runner, monkeypatch):
    """Where their tokens depend on drafts at all, both devices draw the same drafts and accept the same."""
    batch = [msgspec.structs.replace(it, sampling=msgspec.structs.replace(it.sampling, seeded=False)) for it in requests(False)]
    drawn = []
    drafts_pay(monkeypatch)
    left_of = DraftSampler.left_of
    monkeypatch.setattr(DraftSampler, "left_of", lambda *given: drawn.append(len(given[1])) or left_of(*given))
    device = drafting(build_device_runner, checkpoint("llama"), checkpoint("qwen3"), draws="probabilistic")
    found = device.run(batch)
    assert sum(drawn) > 50 and 0 < device.counts["accepted"] < device.counts["drafted"]
    config = device.runner.config
    cpu = build_runner(checkpoint("llama"), form="reference", scheduler=config.scheduler, speculative=config.speculative)
    engine = Engine(cpu, depth=1, num_blocks=100)
    cpu._own_drafts._depth.fill = device.runner._own_drafts._depth.fill  # not for the sake of tapes
    assert engine.run(batch) == found


def test_it_sleeps_and_wakes_with_the_model(checkpoint, build_device_runner, alone_of):  # noqa: F811
    engine = drafting(build_device_runner, checkpoint("llama"), checkpoint("llama"))
    runner, batch = engine.runner, greedy()[:3]
    engine.run(batch)
    runner.sleep(1)
    assert not hasattr(runner, "draft_model") and runner._proposer._bound is None
    runner.wake_up(("weights", "kv_cache"))
    engine.core.scheduler.kv.reset()
    engine.counts.clear()
    again = [msgspec.structs.replace(it, index=it.index + 100, request_id=f"again-{it.index}") for it in batch]
    assert engine.run(again) == {it.index + 100: alone_of("llama", False)[it.index] for it in batch}
    assert engine.counts["drafted"] > 20 and engine.counts["accepted"] == engine.counts["drafted"]


def test_where_no_draft_pays_the_head_still_follows(checkpoint, build_device_runner, alone_of, tmp_path):  # noqa: F811
    folder = save_head(tmp_path / "head", ReferenceHead(eagle3=False).tensors())
    engine = drafting(build_device_runner, checkpoint("llama"), folder, method_of(folder), timings=DEAR)
    follows, follow = [], engine.runner._proposer.follow
    engine.runner._proposer.follow = lambda *given: follows.append(np.count_nonzero(given[-1])) or follow(*given)
    assert engine.run(requests(False)) == alone_of("llama", False)
    assert len(follows) > 20 and not engine.counts["drafted"]
