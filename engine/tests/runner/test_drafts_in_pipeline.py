"""Draft models and heads in the last stage of a pipeline: they change no answer, and draft what they draft beside a whole model.

The stages run in one process, so that drafts can be said to pay, and can be compared with plain torch's.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from draft_heads import ReferenceHead, ReferenceMtp, Told, save_head
from stages_here import Stages
from test_core_with_runner import Engine, requests
from test_draft_heads import HEADS
from test_draft_model import drafts_pay
from test_drafts_in_core import K
from test_pipeline_parallel import NUM_BLOCKS, StagedEngine, config_of

from penstock.engine.args import EngineArgs
from penstock.engine.config import SpeculativeConfig
from penstock.engine.sampling import SamplingParams

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm  # noqa: E402

LIMITS = {"num_speculative_tokens": K, "num_lookahead_tokens": K}
BATCH = [it for it in requests(False) if it.index % 3 == 0 or it.index == 1]
"""Of requests with a common prefix one alone: the last entry of a shared block may rest on another one's next token."""


def staged(path: Path, monkeypatch, stages: int = 2, **speculative: Any) -> StagedEngine:
    drafts_pay(monkeypatch)
    asked = SpeculativeConfig(num_speculative_tokens=K, **speculative)
    config = config_of(path, stages, speculative=asked, scheduler=LIMITS)
    return StagedEngine(config, Stages(config))


@pytest.mark.req("DX-09", "SD-16")
@pytest.mark.parametrize(
    ("method", "name", "stages"),
    [
        pytest.param("eagle", "llama", 2, marks=pytest.mark.slow),
        ("eagle3", "qwen3-windows", 3),
        ("mtp", "llama", 2),
    ],
)
def test_a_head_in_the_last_stage_drafts_what_plain_torch_does(method, name, stages, checkpoint, monkeypatch, tmp_path, loaded):
    """EAGLE-3 takes states of the first two of three stages, and the MTP layer the target's embedding, which is in the first."""
    path = checkpoint(name)
    target = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = Engine(loaded(name), 1, NUM_BLOCKS).run(BATCH)
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
def test_a_draft_model_is_in_the_last_stage_alone(checkpoint, monkeypatch, loaded):
    """The target drafts for itself, and its greedy drafts are right. What it reads leaves the last stage fewer layers."""
    path = checkpoint("qwen3-windows")
    greedy = [msgspec.structs.replace(it, sampling=SamplingParams(max_tokens=24, temperature=0.0)) for it in requests(False)]
    engine = staged(path, monkeypatch, method="draft_model", model=path)
    assert engine.run(greedy) == Engine(loaded("qwen3-windows"), 1, NUM_BLOCKS).run(greedy)
    assert sum(engine.core.stats().step.drafts.accepted) > 150
    kept = [sorted(layer for group in layout.groups for layer in group.layers) for layout in engine.executor.call("kv_layout")]
    assert kept == [[0, 1], [2, 3, 4, 5]]
    assert not hasattr(engine.executor.runners[0], "draft_model")
    args = EngineArgs(model=str(path), device="cpu", pipeline_parallel_size=2, spec_method="draft_model", spec_model=str(path))
    assert args.config().depth == 2
