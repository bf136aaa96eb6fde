"""EAGLE heads beside their target: they change no answer, and draft what plain torch drafts from the whole sequence."""

import json

import msgspec
import numpy as np
import pytest
import torch
from draft_heads import AUX, DRAFT_VOCAB, ReferenceHead, Told, save_head
from test_core_with_runner import OUTPUTS, SCHEDULER, Engine, requests
from test_draft_model import drafts_pay
from test_drafts_in_core import K, Watched
from tiny_models import LLAMA

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError, SpeculativeConfig
from penstock.engine.models.head_config import _aux_layers
from penstock.engine.runner.draft_head import HeadProposer

transformers = pytest.importorskip("transformers")

HEADS = {
    "eagle": ({"eagle3": False}, "layers.0", {}),
    "eagle3": (
        {"eagle3": True, "bias": False},
        "midlayer",
        {"draft_vocab_size": DRAFT_VOCAB, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX)}},
    ),
    "speculators": (
        {"eagle3": True, "bias": False, "norm_before_residual": True, "norm_before_fc": True},
        "layers.0",
        {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX),
            "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
        },
    ),
}


@pytest.fixture(scope="module", params=HEADS)
def head(request, tmp_path_factory):
    """A reference head and its checkpoint."""
    made, layer, fields = HEADS[request.param]
    reference = ReferenceHead(**made)
    if request.param == "speculators":
        from draft_heads import head_config

        fields = fields | {"transformer_layer_config": head_config().to_dict(), "hidden_size": None}
    return reference, save_head(tmp_path_factory.mktemp(request.param), reference.tensors(layer), **fields)


def drafting(checkpoint, build_runner, monkeypatch, folder, depth=1, num_blocks=100):
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K, num_lookahead_tokens=K)
    method = "eagle3" if (json.loads((folder / "config.json").read_text())).get("draft_vocab_size") else "eagle"
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=K, model=folder)
    runner = build_runner(checkpoint("llama"), scheduler=scheduler, speculative=speculative)
    drafts_pay(monkeypatch)
    return Watched(runner, depth, num_blocks)


@pytest.fixture(scope="module")
def alone(checkpoint, build_runner):
    runner, tokens = build_runner(checkpoint("llama"), scheduler=SCHEDULER), {}
    for request in requests(False):
        tokens |= Engine(runner, depth=1, num_blocks=100).run([request])
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("crowded", [False, True], ids=["room", "crowded"])
@pytest.mark.req("SD-16")
def test_a_head_drafts_what_plain_torch_does_and_changes_no_token(
    checkpoint, build_runner, monkeypatch, alone, head, crowded, depth
):
    """Through chunks and preemptions. Of requests with a common prefix one alone, see below."""
    batch = [it for it in requests(False) if it.index % 3 == 0 or it.index == 1]
    reference, folder = head
    target = transformers.LlamaForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).eval()
    told = Told(monkeypatch)
    engine = drafting(checkpoint, build_runner, monkeypatch, folder, depth, 22 if crowded else 100)
    try:
        told.seen.clear()
        assert engine.run(batch) == {it.index: alone[it.index] for it in batch}
        assert (engine.core.stats().preemptions > 0) == crowded
    finally:
        engine.executor.close()
    told.compare(reference, target)


def test_drafts_of_a_head_are_tokens_of_its_own_vocabulary(checkpoint, build_runner, monkeypatch, tmp_path):
    made, layer, fields = HEADS["eagle3"]
    folder = save_head(tmp_path / "head", ReferenceHead(**made).tensors(layer), **fields)
    engine = drafting(checkpoint, build_runner, monkeypatch, folder)
    seen: list[np.ndarray] = []
    propose = HeadProposer.propose

    def watched(*given):
        seen.append(propose(*given))
        return seen[-1]

    monkeypatch.setattr(HeadProposer, "propose", watched)
    engine.run(requests(False)[:3])
    drafts = np.concatenate([it.ravel() for it in seen])
    assert (drafts[drafts >= 0] % 2 == 0).all() and drafts.max() > DRAFT_VOCAB


@pytest.mark.parametrize(
    ("named", "layers", "expected"),
    [(None, 32, (2, 16, 29)), ((1, 15, 28), 32, (2, 16, 29)), ((2, 16, 29), 32, (2, 16, 29)), ((0, 1), 2, (0, 1))],
)
def test_layer_ids_in_both_conventions(named, layers, expected):
    assert _aux_layers({} if named is None else {"eagle_aux_hidden_state_layer_ids": named}, layers) == expected


@pytest.mark.parametrize(
    ("method", "fields", "words"),
    [
        ("draft_model", {}, "the checkpoint is one for the method eagle, not for draft_model"),
        ("eagle", {"vocab_size": 300}, "and the model's takes states of 64 and gives 257 logits"),
        ("eagle", {"target_hidden_size": 128}, "target_hidden_size is 128, and the model's hidden_size is 64"),
        ("eagle", {"fc_norm": True}, "fc_norm is True, which is not supported"),
        ("eagle", {"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not supported"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(checkpoint, tmp_path, method, fields, words):
    folder = save_head(tmp_path / "head", ReferenceHead(eagle3=False).tensors(), **fields)
    args = EngineArgs(model=str(checkpoint("llama")), device="cpu", spec_method=method, spec_model=str(folder))
    with pytest.raises(ConfigError) as error:
        args.config()
    assert words in str(error.value)


def test_requests_that_share_a_prefix_keep_their_answers(checkpoint, build_runner, monkeypatch, alone, head):
    """The last entry of a shared block may rest on another request's next token: that may cost a draft, and never an answer."""
    engine = drafting(checkpoint, build_runner, monkeypatch, head[1])
    assert engine.run(requests(False)) == alone
    assert engine.core.scheduler.totals.prefix_hits > 0 and engine.drafted > 100


COUNTING = {"num_hidden_layers": 2, "tie_word_embeddings": False, "hidden_size": 64, "vocab_size": 64, "initializer_range": 0.0}


@pytest.mark.parametrize("by_state", [False, True], ids=["by-token", "by-state"])
@pytest.mark.req("SD-16")
def test_a_head_that_always_agrees_gives_all_its_drafts(build_runner, monkeypatch, tmp_path, by_state):
    """A model that counts, t + 1 after t, by its embedding alone. The head knows it from the token, or from the state before it:
    a state that is off by one place would draft another number."""
    folder = tmp_path / "counting"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | COUNTING | {"max_position_embeddings": 320})))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.lm_head.weight.copy_(torch.eye(64).roll(1, dims=0))  # row t + 1 reads the place of t
    model.save_pretrained(folder)
    next_of = torch.eye(64).roll(1, dims=0)
    tensors = {name: torch.zeros_like(value) for name, value in ReferenceHead(eagle3=False, vocab=64).tensors().items()}
    del tensors["fc.bias"]
    tensors["embed_tokens.weight"] = torch.eye(64)
    # The state of t scores t + 1, which is the token that the head is given: it moves on by one.
    tensors["fc.weight"] = torch.cat((torch.zeros(64, 64), next_of) if by_state else (torch.eye(64), torch.zeros(64, 64)), dim=1)
    head = save_head(tmp_path / "head", tensors, vocab_size=64)
    engine = drafting(lambda _: folder, build_runner, monkeypatch, head)
    batch = [msgspec.structs.replace(it, prompt_token_ids=[3 + it.index, 4 + it.index]) for it in requests(False)[::2][:2]]
    tokens = engine.run(batch)
    assert tokens == {it.index: [(5 + it.index + n) % 64 for n in range(OUTPUTS)] for it in batch}
    assert engine.drafted > 20 and engine.accepted == engine.drafted


@pytest.mark.req("SD-18")
def test_a_speculator_alone_finds_its_target(checkpoint, tmp_path):
    made, layer, fields = HEADS["speculators"]
    config = fields["speculators_config"] | {"verifier": {"name_or_path": str(checkpoint("llama"))}}
    folder = save_head(
        tmp_path / "head", ReferenceHead(**made).tensors(layer), **(fields | {"speculators_config": config, "vocab_size": 257})
    )
    found = EngineArgs(model=str(folder), device="cpu").config()
    assert found.model.path == checkpoint("llama") and found.model.served_names == (str(folder),)
    assert found.speculative is not None and found.speculative.model == folder
    with pytest.raises(ConfigError, match="is a draft head itself"):
        EngineArgs(model=str(folder), device="cpu", spec_model=str(folder)).config()


@pytest.mark.req("SD-18")
def test_the_method_and_the_number_of_drafts_are_the_checkpoints(checkpoint, head):
    reference, folder = head
    config = EngineArgs(model=str(checkpoint("llama")), device="cpu", spec_model=str(folder)).config()
    speculators = "speculators_model_type" in json.loads((folder / "config.json").read_text())
    assert config.speculative is not None
    assert config.speculative.method == ("eagle3" if reference.eagle3 else "eagle")
    assert config.speculative.num_speculative_tokens == (3 if speculators else 4)
