"""Every tensor is accounted for."""

import io
import json
import logging
import os

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.config import ConfigError
from penstock.engine.loading import progress
from penstock.engine.loading.loader import Source, fill
from penstock.engine.loading.safetensors import INDEX, check_weights
from penstock.engine.loading.stream import pieces, stream_weights
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


def test_loads_one_file_and_says_how_far_it_is(tmp_path, caplog, monkeypatch):
    save_file({"a": A, "b": B.bfloat16(), "old": A.clone()}, tmp_path / "model.safetensors")
    model = Model()
    monkeypatch.setattr(progress, "PERIOD_S", 0.0)
    with caplog.at_level(logging.INFO):
        fill(model, Source(tmp_path), torch.float32)
    assert torch.equal(model.a, A) and torch.equal(model.b, B.bfloat16().float())
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == [
        "weights: 75% of 0.00 GB",
        "weights: 100% of 0.00 GB",
        "loaded 2 tensors, 0.0 MB,",
    ]


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    fill(Model(), Source(tmp_path), torch.float32)
    assert "weights" in terminal.getvalue() and "40/40 bytes" in terminal.getvalue()


@pytest.mark.req("LD-02")
def test_loads_the_shards_that_the_index_names(tmp_path):
    shards(tmp_path, {"a": A}, {"b": B})
    save_file({"stray": A}, tmp_path / "consolidated.safetensors")
    model = Model()
    fill(model, Source(tmp_path), torch.float32)
    assert torch.equal(model.a, A) and torch.equal(model.b, B)


@pytest.mark.req("LD-02")
@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a": A}, r"lacks the tensors b$"),
        ({"a": A, "b": B, "c": A.clone(), "d": A.clone()}, r"has the unexpected tensors c, d$"),
        ({"c": A}, r"lacks the tensors a, b and has the unexpected tensors c$"),
        ({"a": A.T.contiguous(), "b": B}, r"tensor a: shape \[3, 2\], expected \[2, 3\]"),
        ({"a": A, "b": B.to(torch.int8)}, r"tensor b: dtype I8, expected BF16 or F16 or F32$"),
    ],
)
def test_refuses_by_name(tmp_path, tensors, sentence):
    save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    with pytest.raises(ConfigError, match=sentence):
        fill(model, Source(tmp_path), torch.float32)
    assert not model.a.any() and not model.b.any(), "nothing is loaded before everything is checked"


def test_refuses_a_missing_or_damaged_file(tmp_path):
    first, second = shards(tmp_path, {"a": A}, {"b": B})
    (tmp_path / second).unlink()
    with pytest.raises(ConfigError, match=f"lacks {second}"):
        fill(Model(), Source(tmp_path), torch.float32)
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes()[:-4])
    with pytest.raises(ConfigError, match=f"{second} is damaged"):
        fill(Model(), Source(tmp_path), torch.float32)


class Device:
    """An uploader that looks whether anything was written to pinned memory before the copy from it was over."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.under_way, self.uploads, self.slots = [], 0, 0

    def pinned(self, *shape, dtype):
        self.slots += 1
        return torch.empty(shape, dtype=dtype)

    def upload(self, source, target):
        self.uploads += 1
        target.copy_(source)
        self.under_way.append((source, source.clone()))

    def download(self, pairs):
        assert not pairs
        return self

    def wait(self):
        for source, then in self.under_way:
            assert torch.equal(source, then), "a slot was filled again while the device still read it"
        self.under_way = []


@pytest.mark.parametrize("slot_bytes", [4, 7, 8, 1000])
def test_a_device_gets_every_byte_through_slots_that_are_used_again(tmp_path, slot_bytes):
    shards(tmp_path, {"a": A}, {"b": B.bfloat16(), "old": A.clone()})
    model, device, seen = Model(), Device(), progress.Progress(0)
    stream_weights(model, check_weights(model, tmp_path), device, seen, slot_bytes)
    assert torch.equal(model.a, A) and torch.equal(model.b, B.bfloat16().float())
    assert (device.uploads, seen.done) == (-(-24 // slot_bytes) + -(-8 // slot_bytes), 32)
    assert device.slots == min(device.uploads, 8) and not device.under_way


def test_pieces_cover_every_tensor():
    assert pieces([10, 0, 4], 4) == [(0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 0), (2, 0, 4)]


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    model = Model()
    tensors = check_weights(model, tmp_path)
    os.truncate(tmp_path / "model.safetensors", tensors[-1].offset + 3)
    with pytest.raises(ConfigError, match=f"model.safetensors is damaged: it ends within tensor {tensors[-1].name}"):
        stream_weights(model, tensors, Device())


@pytest.mark.gpu
def test_a_real_device_gets_every_byte(tmp_path):
    from penstock.engine.runner.device.runtime import CudaRuntime

    runtime, weights = CudaRuntime(), {f"w{index}": torch.randn(300, 1000 + index) for index in range(40)}
    save_file(weights, tmp_path / "model.safetensors")

    held = {name: torch.zeros_like(value, device=runtime.device) for name, value in weights.items()}

    class OnDevice:
        def weights(self):
            return {name: Weight(tuple(value.shape), value.copy_) for name, value in held.items()}

        def ignores(self, name):
            return False

    model = OnDevice()
    with runtime.main_stream():
        stream_weights(model, check_weights(model, tmp_path), runtime, slot_bytes=1 << 18)
    assert all(torch.equal(value.cpu(), weights[name]) for name, value in held.items())
