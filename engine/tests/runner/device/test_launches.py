"""How many launches a step is made of, as a recording launcher counts them: of Triton's kernels, of torch and its libraries."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from penstock.engine.args import EngineArgs
from penstock.engine.runner.device.graphs.descriptor import BatchDescriptor
from penstock.engine.runner.device.graphs.step import LOGITS
from penstock.engine.runner.device.warm import MetaRunner
from penstock.kernels.sampling.buffers import Path as SamplerPath

SHAPES = Path(__file__).resolve().parents[4] / "benchmarks/shapes"
ROWS = 8


class Launches(TorchDispatchMode):
    """Counts what would run on a device: calls of torch that compute, a launch each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if not func.is_view and "empty" not in name and name not in ("aten::_unsafe_view", "aten::set_"):
            self.names.append(name)
        return func(*args, **kwargs or {})


@pytest.fixture
def recorded(monkeypatch, interpreted):
    """`recorded(shape)`: a model's capturable step, and what records its launches."""
    found = Launches()

    class Recorded:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid):
            return lambda *_args, **_options: found.names.append(self._name)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: Recorded(self.fn.__name__)[grid])

    def load(shape: str):
        config = EngineArgs(model=str(SHAPES / shape), load_format="dummy", max_num_seqs=64, max_model_len=8192).config("cuda")
        runner = MetaRunner(config, "sm_90")
        runner.load()
        runner.initialize_kv_cache(1)
        return runner._capturable, found

    return load


def count(found: Launches, run) -> Counter[str]:
    """Launches by name."""
    found.names.clear()
    with torch.inference_mode(), found:
        run()
    return Counter(found.names)


@pytest.mark.parametrize(("shape", "number"), [("qwen3-0.6b", 176), ("llama-3.1-8b", 200)])
def test_a_decode_of_eight_is_few_launches(recorded, shape, number):
    step, found = recorded(shape)
    key = BatchDescriptor(ROWS, ROWS, 1, False, SamplerPath.GREEDY)
    count(found, lambda: step.pad(key))
    launched = count(found, lambda: step.step(key))
    assert launched.total() == number, launched


@pytest.mark.parametrize(("shape", "layers", "kernels", "pieces"), [("qwen3-0.6b", 28, 286, 116), ("llama-3.1-8b", 32, 326, 132)])
def test_a_mixed_step_costs_the_host_one_launch_whole_and_many_in_pieces(recorded, shape, layers, kernels, pieces):
    """64 tokens of up to 8 requests, as far as the logits: so many kernels, which one graph launches; or so many launches of
    pieces, of the attentions between them, and of what comes before and after the model."""
    step, found = recorded(shape)
    key = BatchDescriptor(64, 8, None, False, LOGITS)
    count(found, lambda: step.pad(key))
    whole = count(found, lambda: step.step(key))
    assert whole.total() == kernels, whole

    gaps = []

    def outside(layer, q, k, v, rotary, out=None):
        gaps.append(layer)
        return torch.empty(len(q), layer.out_size, dtype=q.dtype, device=q.device)

    within = count(found, lambda: step.forward(key, outside))
    assert len(gaps) == layers
    assert whole.total() - within.total() + layers + 1 == pieces
