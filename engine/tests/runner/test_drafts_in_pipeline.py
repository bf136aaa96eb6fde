"""Draft models and heads in the last stage of a pipeline: they change no answer, and draft what they draft beside a whole model.

The stages run in one process, so that drafts can be said to pay, and can be compared with plain torch's.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from draft_heads import ReferenceHead, ReferenceMtp, Told, save_head
from lora_adapters import make_adapter
from quantized_checkpoints import awq
from stages_here import Stages
from test_core_with_runner import SCHEDULER, Engine, requests
from test_draft_heads import HEADS
from test_draft_model import drafts_pay
from test_drafts_in_core import K
from test_pipeline_parallel import LORA, NUM_BLOCKS, StagedEngine, config_of, loaded_adapter

from penstock.engine.args import EngineArgs
from penstock.engine.config import LoraConfig, SpeculativeConfig
from penstock.engine.core.memory import OffloadSize
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm  # noqa: E402

LIMITS = {"num_speculative_tokens": K, "num_lookahead_tokens": K}
BATCH = [it for it in requests(False) if it.index % 3 == 0 or it.index == 1]
"""Of requests with a common prefix one alone: the last entry of a shared block may rest on another one's next token."""


def staged(path: Path, monkeypatch, stages: int = 2, lora: LoraConfig | None = None, **speculative: Any) -> StagedEngine:
    drafts_pay(monkeypatch)
    asked = SpeculativeConfig(num_speculative_tokens=K, **speculative)
    config = config_of(path, stages, speculative=asked, scheduler=LIMITS, lora=lora)
    return StagedEngine(config, Stages(config))


def greedily() -> list[AddRequest]:
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    return [msgspec.structs.replace(it, sampling=sampling) for it in requests(False)]


@pytest.mark.req("DX-09", "SD-16")
@pytest.mark.parametrize(
    ("method", "name", "stages"),
    [
        pytest.param("eagle", "llama", 2, marks=pytest.mark.slow),
        ("eagle3", "qwen3-windows", 3),
        ("mtp", "llama", 2),
    ],
)
def test_a_head_in_the_last_stage_drafts_what_plain_torch_does(method, name, stages, checkpoint, monkeypatch, tmp_path, warmed):
    """EAGLE-3 takes states of the first two of three stages, and the MTP layer the target's embedding, which is in the first."""
    path = checkpoint(name)
    target = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = Engine(warmed(name), 1, NUM_BLOCKS).run(BATCH)
    if method == "mtp":
        reference = ReferenceMtp(target, LlamaDecoderLayer, LlamaRMSNorm, recycles_normed=True)
        path, folder = reference.save(path, tmp_path / "target"), None
    else:
        made, layer, fields = HEADS[method]
        reference = ReferenceHead(**made)
        folder = save_head(tmp_path / "head", reference.tensors(layer), **fields)
    told = Told(monkeypatch)
    engine = staged(path, monkeypatch, stages, method=method, model=folder)
    told.seen.clear()
    assert engine.run(BATCH) == expected
    told.compare(reference, target)


@pytest.mark.req("DX-09")
def test_a_draft_model_is_in_the_last_stage_alone(checkpoint, monkeypatch, warmed):
    """The target drafts for itself, and its greedy drafts are right. What it reads leaves the last stage fewer layers."""
    path = checkpoint("qwen3-windows")
    greedy = greedily()
    engine = staged(path, monkeypatch, method="draft_model", model=path)
    assert engine.run(greedy) == Engine(warmed("qwen3-windows"), 1, NUM_BLOCKS).run(greedy)
    assert sum(engine.core.stats().step.drafts.accepted) > 150
    kept = [sorted(layer for group in layout.groups for layer in group.layers) for layout in engine.executor.call("kv_layout")]
    assert kept == [[0, 1], [2, 3, 4, 5]]
    assert not hasattr(engine.executor.runners[0], "draft_model")
    args = EngineArgs(model=str(path), device="cpu", pipeline_parallel_size=2, spec_method="draft_model", spec_model=str(path))
    assert args.config().depth == 2


def test_adapters_and_a_draft_model_share_stages(checkpoint, build_runner, monkeypatch, tmp_path):
    """The adapter is on the target alone, so its requests' drafts are right less often, and their tokens are its own."""
    path, batch = checkpoint("llama"), [msgspec.structs.replace(it, lora_id=it.index % 2) for it in greedily()]
    adapter = make_adapter(tmp_path / "adapter", transformers.AutoModelForCausalLM.from_pretrained(path), seed=1, scale=0.5)
    whole = Engine(build_runner(path, scheduler=SCHEDULER, lora=LORA), 1, NUM_BLOCKS)
    engine, found = staged(path, monkeypatch, lora=LORA, method="draft_model", model=path), list[dict[int, list[int]]]()
    for each in (whole, engine):
        assert loaded_adapter(each, "a0", adapter) is None
        found.append(each.run(batch))
    plain = whole.run(greedily())
    assert found[0] == found[1] and found[0] != plain
    assert sum(engine.core.stats().step.drafts.accepted) > 20


def test_a_quantized_checkpoint_in_stages_drafts_and_keeps_pages(checkpoint, build_runner, monkeypatch, tmp_path):
    path, batch = tmp_path / "few", greedily()
    awq(checkpoint("llama"), path, group=16)
    expected = Engine(build_runner(path, scheduler=SCHEDULER), 1, NUM_BLOCKS).run(batch)
    engine = staged(path, monkeypatch, method="draft_model", model=checkpoint("llama"))
    assert engine.run(batch) == expected
    assert sum(engine.core.stats().step.drafts.accepted) > 20
    engine.executor.call("initialize_kv_cache", 30)
    engine.executor.call("initialize_offload", 400)
    page = max(layout.page_bytes for layout in engine.executor.call("kv_layout"))
    small = StagedEngine(engine.executor.config, engine.executor, 30, OffloadSize(400, page, keepers=(0, 1)))
    for _ in range(2):
        assert small.run(batch) == expected
    told = small.core.stats().offload
    assert told is not None and told.memory.loaded_bytes > 0 and told.memory.failed_pages == 0
