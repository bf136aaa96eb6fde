"""A model that sleeps at level 1 leaves the device, and comes back as it was for everybody who holds a part of it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from penstock.engine.loading.dummy import load_dummy
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.build import Build
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.layers.linear_method import UnquantizedLinearMethod
from penstock.engine.models.layers.norm import RMSNorm
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.llama import LlamaForCausalLM
from penstock.engine.runner.device.offload import HostCopy, storages_of
from penstock.engine.runner.device.runtime import CudaRuntime
from penstock.kernels.ops import REFERENCE
from penstock.kernels.prepare_kv.reference import QKNorm

SHAPES = Path(__file__).parents[4] / "benchmarks/shapes"


class Host:
    """This machine as a device whose copies to the host come late: whoever gives memory back before that loses it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.pins, self.returned, self._late = [], 0, []

    def pinned(self, *shape, dtype):
        self.pins.append(torch.empty(shape, dtype=dtype).fill_(255))
        return self.pins[-1]

    def upload(self, source, target):
        target.copy_(source)

    def download(self, pairs):
        self._late = list(pairs)
        return self

    def wait(self):
        for source, target in self._late:
            target.copy_(source)
        self._late = []

    def synchronize(self):
        pass

    def return_free_memory(self):
        self.returned += 1


class Model:
    """Fused weights with views of them, a norm that others hold, and tables."""

    __module__ = "penstock.engine.models.pretended"

    def __init__(self, device: str) -> None:
        self.qkv = torch.randn(30, 7, device=device)
        self.parts = {"q": self.qkv[:10], "kv": [self.qkv[10:]]}
        self.norm = RMSNorm("norm", 5, 1e-6, REFERENCE)
        self.norm.weight = torch.randn(5, device=device)
        self.held = QKNorm(self.norm.weight, self.norm.weight, 1e-6)
        self.tables = (torch.arange(11, device=device), torch.empty(0, device=device))
        self.itself = self

    def tensors(self) -> list[torch.Tensor]:
        return [self.qkv, self.parts["q"], self.parts["kv"][0], self.norm.weight, self.held.q_weight, *self.tables]


def expected_bytes() -> int:
    return 30 * 7 * 4 + 5 * 4 + 11 * 8


@pytest.mark.req("MEM-06")
@pytest.mark.parametrize("slab_bytes", [16, 100, 1 << 20])
def test_every_tensor_leaves_and_comes_back_for_all_who_hold_it(slab_bytes):
    model, host = Model("cpu"), Host()
    before = [tensor.clone() for tensor in model.tensors()]
    copy = HostCopy(host, model, slab_bytes)
    assert copy.nbytes == expected_bytes(), "a storage that several share counts once"
    assert (
        sum(storage.nbytes() for storage in {id(s): s for s in map(torch.Tensor.untyped_storage, model.tensors())}.values()) == 0
    )
    assert len(host.pins) == -(-expected_bytes() // slab_bytes)
    copy.restore()
    assert all(map(torch.equal, model.tensors(), before))
    model.qkv[0, 0] = 7.0
    assert model.parts["q"][0, 0] == 7.0, "a view is a view again"
    assert host.returned == 2


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.1-8b"])
def test_every_byte_of_a_real_model_is_found(shape):
    """Each tensor of the checkpoint, and the tables of cosines and sines beside them."""
    raw = read_object(SHAPES / shape / "config.json") | {"num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 64}
    config = parse_decoder_config(raw)
    build = Build(ops=REFERENCE, linear_method=UnquantizedLinearMethod, dtype=torch.bfloat16, max_model_len=50, shard=Shard())
    model = LlamaForCausalLM(config, build)
    load_dummy(model, torch.bfloat16, torch.device("cpu"))
    model.finish()
    sizes = {name: torch.Size(weight.shape).numel() for name, weight in model.weights().items()}
    weights = sum(size * (4 if "norm" in name else 2) for name, size in sizes.items())
    lm_head = 2 * 300 * config.hidden_size if config.tie_word_embeddings else 0
    found = sum(storage.nbytes() for storage in storages_of(model))
    assert found == weights + lm_head + 2 * 4 * 50 * config.head_size // 2


@dataclass(frozen=True)
class _Foreign:
    tensor: torch.Tensor


def test_what_is_not_ours_is_left_alone():
    assert not list(storages_of([_Foreign(torch.ones(3))]))


@pytest.mark.gpu
@pytest.mark.req("MEM-06")
def test_a_real_devices_memory_falls_and_comes_back():
    runtime = CudaRuntime()
    model = Model("cuda")
    model.large = torch.randn(64 << 20, device="cuda")
    before, allocated = [tensor.clone() for tensor in (*model.tensors(), model.large)], runtime.memory().allocated
    copy = HostCopy(runtime, model)
    assert allocated - runtime.memory().allocated > 0.99 * (256 << 20)
    copy.restore()
    assert all(map(torch.equal, (*model.tensors(), model.large), before))
