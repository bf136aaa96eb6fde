"""How many launches a step is made of, as a recording launcher counts them: of Triton's kernels, of torch and its libraries."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from penstock.engine.args import EngineArgs
from penstock.engine.runner.device.graphs.descriptor import BatchDescriptor
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
def launches(monkeypatch, interpreted):
    """`launches(shape)`: by name, those of a greedy decode of 8 requests, of which a graph is captured."""

    def count(shape: str) -> Counter[str]:
        found = Launches()

        class Recorded:
            def __init__(self, name: str) -> None:
                self._name = name

            def __getitem__(self, grid):
                return lambda *_args, **_options: found.names.append(self._name)

        monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: Recorded(self.fn.__name__)[grid])
        config = EngineArgs(model=str(SHAPES / shape), load_format="dummy", max_num_seqs=ROWS, max_model_len=8192).config("cuda")
        runner = MetaRunner(config, "sm_90")
        runner.load()
        runner.initialize_kv_cache(1)
        key = BatchDescriptor(ROWS, ROWS, 1, False, SamplerPath.GREEDY)
        with torch.inference_mode():
            runner._capturable.pad(key)
            found.names.clear()
            with found:
                runner._capturable.step(key)
        return Counter(found.names)

    return count


@pytest.mark.parametrize(("shape", "number"), [("qwen3-0.6b", 176), ("llama-3.1-8b", 200)])
def test_a_decode_of_eight_is_few_launches(launches, shape, number):
    found = launches(shape)
    assert found.total() == number, found
