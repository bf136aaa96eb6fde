"""Every tensor is accounted for."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.config import ConfigError
from penstock.engine.loading.safetensors import INDEX, load_weights
from penstock.engine.models.layers.weight import Weight


class Model:
    """Takes `a` [2, 3] and `b` [4]; does not need `old`."""

    def __init__(self) -> None:
        self.a, self.b = torch.zeros(2, 3), torch.zeros(4)

    def weights(self):
        return {"a": Weight((2, 3), self.a.copy_), "b": Weight((4,), self.b.copy_)}

    def ignores(self, name):
        return name == "old"


A, B = torch.randn(2, 3), torch.randn(4)


def shards(path, *files: dict[str, torch.Tensor]):
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, path / name)
    weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return names


def test_loads_one_file_and_says_how_far_it_is(tmp_path, caplog):
    save_file({"a": A, "b": B.bfloat16(), "old": A.clone()}, tmp_path / "model.safetensors")
    model, seen = Model(), []
    with caplog.at_level(logging.INFO):
        load_weights(model, tmp_path, lambda done, total: seen.append((done, total)))
    assert torch.equal(model.a, A) and torch.equal(model.b, B.bfloat16().float())
    assert [done for done, _ in seen] == [24, 32] and seen[0][1] == (tmp_path / "model.safetensors").stat().st_size
    assert "loaded 2 tensors" in caplog.text


def test_loads_the_shards_that_the_index_names(tmp_path):
    shards(tmp_path, {"a": A}, {"b": B})
    save_file({"stray": A}, tmp_path / "consolidated.safetensors")
    model = Model()
    load_weights(model, tmp_path)
    assert torch.equal(model.a, A) and torch.equal(model.b, B)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a": A}, r"lacks the tensors b$"),
        ({"a": A, "b": B, "c": A.clone(), "d": A.clone()}, r"has the unexpected tensors c, d$"),
        ({"c": A}, r"lacks the tensors a, b and has the unexpected tensors c$"),
        ({"a": A.T.contiguous(), "b": B}, r"tensor a: shape \[3, 2\], expected \[2, 3\]"),
        ({"a": A, "b": B.to(torch.int8)}, r"tensor b: dtype torch.int8"),
    ],
)
def test_refuses_by_name(tmp_path, tensors, sentence):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=sentence):
        load_weights(Model(), tmp_path)


def test_refuses_a_missing_or_damaged_file(tmp_path):
    first, second = shards(tmp_path, {"a": A}, {"b": B})
    (tmp_path / second).unlink()
    with pytest.raises(ConfigError, match=f"lacks {second}"):
        load_weights(Model(), tmp_path)
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes()[:-4])
    with pytest.raises(ConfigError, match=f"{second} is damaged"):
        load_weights(Model(), tmp_path)
