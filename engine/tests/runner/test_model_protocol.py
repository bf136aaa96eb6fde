"""A model's seams: embeddings in place of tokens, states of layers, pipeline stages, an MLP of its own in each layer."""

import pytest
import torch
from test_device_models import VOCAB, DeviceModel, prompt

from penstock.engine.loading.dummy import load_dummy
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.linear_method import CPU
from penstock.engine.models.layers.shard import Stage
from penstock.engine.models.llama import MLP, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP

FAMILIES = ["llama", "llama-7to1-llama3-tied", "gemma2", "olmo2"]


class Watched:
    """A model whose forward pass can be asked for more."""

    def __init__(self, model) -> None:
        self.model, self.calls = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)


def spied(device: DeviceModel, forward) -> torch.Tensor:
    """A step of two prompts whose forward pass is `forward(model, ids, positions, ctx)`."""
    model = device.model
    device.model = Watched(model)
    device.model.forward = lambda *given: forward(model, *given)
    try:
        return device.step({0: (prompt(1, 30), 30), 2: (prompt(2, 7), 7)})
    finally:
        device.model = model


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_stand_for_tokens(name, checkpoint):
    device = DeviceModel(checkpoint(name)).load(checkpoint(name))
    plain = spied(device, lambda model, ids, *rest: model.forward(ids, *rest))
    assert torch.equal(spied(device, lambda model, ids, *rest: model.forward(model.embed(ids), *rest)), plain)
    assert not torch.equal(spied(device, lambda model, ids, *rest: model.forward(model.embed(ids) * 2, *rest)), plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_states_of_layers_are_those_that_transformers_shows(name, checkpoint):
    transformers = pytest.importorskip("transformers")
    device, aux = DeviceModel(checkpoint(name)).load(checkpoint(name)), {1: torch.empty(0)}
    spied(device, lambda model, *given: model.forward(*given, aux=aux))
    kinds = {"torch_dtype": torch.float32, "attn_implementation": "eager"}
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), **kinds).eval()
    with torch.inference_mode():
        expected = [reference(torch.tensor([prompt(*of)]), output_hidden_states=True) for of in ((1, 30), (2, 7))]
    states = torch.cat([found.hidden_states[1][0] for found in expected])
    assert set(aux) == {1}
    torch.testing.assert_close(aux[1], states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_pipeline_stages_together_give_the_bits_of_one(name, checkpoint):
    path = checkpoint(name)
    whole = DeviceModel(path).load(path)
    expected = spied(whole, lambda model, *given: model.forward(*given))
    first, last = (DeviceModel(path, stage=Stage(rank, 2)).load(path) for rank in range(2))

    def both(model, *given):
        return model.forward(*given, carry=first.model.advance(*given))

    assert torch.equal(spied(last, both), expected) and expected.shape == (2, VOCAB)
    names = [set(stage.model.weights()) for stage in (first, last)]
    shared = {"model.embed_tokens.weight"} if whole.config.tie_word_embeddings else set()
    assert names[0] | names[1] == set(whole.model.weights()) and names[0] & names[1] == shared
    assert len(first.model.layers) + len(last.model.layers) == whole.config.num_layers
    assert first.model.lm_head is None and (last.model.embed_tokens is None) == (not shared)


def test_more_stages_than_layers_are_refused(checkpoint):
    with pytest.raises(ValueError, match="num_hidden_layers 2 cannot be divided among 3 pipeline stages"):
        DeviceModel(checkpoint("llama"), stage=Stage(0, 3))


class TwiceMLP(LlamaMLP):
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(hidden)


class MixedLayer(LlamaDecoderLayer):
    def make_mlp(self, config: DecoderConfig, build: Build, index: int) -> MLP:
        assert build.prefix == f"model.layers.{index}.mlp"
        return TwiceMLP(config, build) if index == 1 else super().make_mlp(config, build, index)


class MixedModel(LlamaForCausalLM):
    decoder_layer = MixedLayer


def test_each_layer_chooses_its_mlp(checkpoint, monkeypatch):
    path = checkpoint("llama")
    plain = DeviceModel(path).load(path)
    monkeypatch.setattr("test_device_models.model_class", lambda _: MixedModel)
    mixed = DeviceModel(path).load(path)
    assert [type(layer.mlp) for layer in mixed.model.layers] == [LlamaMLP, TwiceMLP]
    plain.model.layers[1].mlp.down_proj._method.weight.mul_(2)
    logits = [spied(device, lambda model, *given: model.forward(*given)) for device in (plain, mixed)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_linear_methods_are_asked_by_the_names_of_the_checkpoint(name, checkpoint):
    modules: list[str] = []

    def wrap(method):
        def make(layer):
            modules.extend(layer.modules)
            return method(layer)

        return make

    model = DeviceModel(checkpoint(name), wrap=wrap).model
    load_dummy(model, torch.float32, CPU)
    stored = {
        key.removesuffix(".weight") for key, weight in model.weights().items() if weight.part is not None and "weight" in key
    }
    assert set(modules) - {"lm_head"} == stored - {"lm_head"}
