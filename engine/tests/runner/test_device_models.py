"""Every family built for a device: its logits are those of the CPU's runner, and no value is read by the host on the way."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch
from lora_adapters import ALL, make_adapter, merged
from tiny_models import LATENT

from penstock.engine.attention.context import ForwardContext, GroupInputs
from penstock.engine.config import LoraConfig
from penstock.engine.core.plan import SlotLoad, StepPlan, empty
from penstock.engine.loading.json_files import read_object
from penstock.engine.loading.loader import Source, fill
from penstock.engine.lora.runner import device_lora_runner
from penstock.engine.models.build import Build
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.kv import kv_layers
from penstock.engine.models.layers.comm import Comm, OneRank
from penstock.engine.models.layers.linear_choice import linear_method
from penstock.engine.models.layers.linear_method import CPU, DeviceLinearMethod
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.shard import Shard, Span, Stage
from penstock.engine.models.registry import model_class
from penstock.engine.sampling import SamplingParams
from penstock.kernels.lora.device import DeviceLoraBatch
from penstock.kernels.ops import Ops, device_reference_ops, triton_ops
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.device_reference import paged_attention_device
from penstock.kernels.prepare_kv.reference import PAD_SLOT_ID

NAMES = ["llama", "llama-7to1-llama3-tied", "llama-mha-linear-bias", "qwen3-windows", "qwen2-yarn", "mistral-7to1-window"]
NAMES += ["gemma2", "gemma3", "phi3-longrope", "olmo2", "gpt-oss", *LATENT]
SHARDED = ["llama", "qwen3-windows", "gemma2", "phi3-longrope", "olmo2"]
ALONE, WHOLE = Shard(), Stage()
BLOCK_SIZE, VOCAB = 16, 257
ALL_LOGPROBS = SamplingParams(max_tokens=100, temperature=0.0, logprobs=VOCAB)


class DeviceModel:
    """A model on a device, and one request's cache: request r has the blocks from 1 + 8 r on, the spare row none."""

    def __init__(
        self,
        path,
        device: torch.device = CPU,
        wrap=lambda method: method,
        ops: Ops | None = None,
        shard: Shard = ALONE,
        comm: Comm | None = None,
        stage: Stage = WHOLE,
    ) -> None:
        raw = read_object(path / "config.json")
        self.config, self.device = parse_decoder_config(raw), device
        self.ops = ops or device_reference_ops()
        build = Build(
            ops=self.ops,
            linear_method=wrap(partial(DeviceLinearMethod, device=device)),
            dtype=torch.float32,
            max_model_len=320,
            shard=shard,
            comm=comm or OneRank(),
            stage=stage,
            layers=stage.layers([1.0] * self.config.num_layers),
            device=device,
        )
        self.model = model_class(raw["architectures"][0])(self.config, build)
        kept = kv_layers(self.config, shard.kv_heads(self.config.num_kv_heads).size, "float32", 320)
        shapes = [(32, *layer.planes[0].of(BLOCK_SIZE)) for layer in kept]
        self.caches = [torch.full(shape, float("nan"), device=device) for shape in shapes]

    def load(self, path) -> "DeviceModel":
        with torch.inference_mode():
            fill(self.model, Source(path), torch.float32)
            self.model.finish()
        return self

    @torch.inference_mode()
    def step(self, work: dict[int, tuple[list[int], int]], padding: int = 0) -> torch.Tensor:
        """Logits of each request's last token: `work` has by request its tokens so far and how many of them are new."""
        lengths = np.array([count for _, count in work.values()], np.int32)
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        ids, positions, slots = [0] * padding, [0] * padding, [PAD_SLOT_ID] * padding
        for row, (tokens, count) in reversed(work.items()):
            at = range(len(tokens) - count, len(tokens))
            ids, positions = tokens[-count:] + ids, [*at, *positions]
            slots = [(1 + 8 * row) * BLOCK_SIZE + position for position in at] + slots
        # A request of padding stands after the others, in the spare row.
        table = np.array([*(range(1 + 8 * row, 9 + 8 * row) for row in range(3)), [0] * 8], np.int32)
        groups = {
            window: GroupInputs(
                torch.tensor(slots).to(self.device),
                DeviceBatch.from_host(
                    np.append(starts, starts[-1]),
                    np.array([*(len(tokens) for tokens, _ in work.values()), 0], np.int32),
                    table,
                    BLOCK_SIZE,
                    window,
                    rows=np.array([*work, 3], np.int32),
                    num_tokens=len(ids),
                    device=self.device,
                ),
            )
            for window in self.config.windows
        }
        ctx = ForwardContext(self.ops, self.caches, [groups[window] for window in self.config.windows])
        inputs = torch.tensor(ids, dtype=torch.int32).to(self.device), torch.tensor(positions).to(self.device)
        hidden = self.model.forward(*inputs, ctx)
        return self.model.compute_logits(hidden.index_select(0, torch.from_numpy(starts[1:] - 1).to(self.device)))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def reference_logprobs(play, tokens: list[int]) -> torch.Tensor:
    """The CPU's runner on the last of them."""
    result = play.step([(play.admit(tokens, ALL_LOGPROBS), len(tokens))]).logprobs
    found = torch.empty(VOCAB)
    return found.scatter(0, torch.tensor(result.top_ids[0]).long(), torch.tensor(result.top_logprobs[0]))


@pytest.mark.req("ATT-31", "CG-07")
@pytest.mark.parametrize("name", NAMES)
def test_logits_on_a_device_are_those_of_the_cpu(name, checkpoint, loaded, driver):
    path, play = checkpoint(name), driver(loaded(name))
    model, first, second = DeviceModel(path).load(path), prompt(1, 63), prompt(2, 20)
    model.step({0: (first[:40], 40)}, padding=3)
    logits = [
        model.step({0: (first[:-1], 22), 2: (second[:-1], 19)}, padding=2),
        model.step({2: (second, 1), 0: (first, 1)}, padding=1),
    ]
    given = torch.log_softmax(torch.cat(logits), -1)
    expected = torch.stack([reference_logprobs(play, tokens) for tokens in (first[:-1], second[:-1], second, first)])
    torch.testing.assert_close(given, expected, rtol=0, atol=3e-5)


class ThreadComm:
    """One rank of a group of threads."""

    def __init__(self, rank: int, group: Barrier, shared: list[torch.Tensor]) -> None:
        self._rank, self._group, self._shared = rank, group, shared
        self.reduced = self.gathered = 0

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self._rank] = x
        self._group.wait(10)
        found = list(self._shared)
        self._group.wait(10)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.reduced += 1
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered += 1
        return torch.cat(self._exchange(x), -1)


def on_ranks(world: int, run) -> list:
    """What `run(shard, comm)` gives on each rank."""
    group, shared = Barrier(world), [torch.empty(0)] * world

    def rank(number: int):
        try:
            return run(Shard(number, world), ThreadComm(number, group, shared))
        except Exception:
            group.abort()
            raise

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in SHARDED), ("llama", 4), ("olmo2", 4)])
def test_ranks_together_give_the_logits_of_one(name, world, checkpoint):
    """Fewer KV heads than ranks and a vocabulary that does not divide among them."""
    path, tokens = checkpoint(name), prompt(1, 40)
    work = [{0: (tokens[:30], 30), 2: (tokens[:7], 7)}, {0: (tokens[:31], 1), 2: (tokens[:8], 1)}]
    whole = DeviceModel(path).load(path)
    expected = torch.cat([whole.step(each) for each in work])

    def run(shard: Shard, comm: ThreadComm):
        model = DeviceModel(path, shard=shard, comm=comm).load(path)
        return torch.cat([model.step(each) for each in work]), comm, model

    ranks = on_ranks(world, run)
    for logits, comm, model in ranks:
        assert torch.equal(logits, ranks[0][0]) and logits.shape == (4, VOCAB)
        assert comm.reduced == 2 * (2 * model.config.num_layers + 1), "in each step, two of a layer and the embedding's"
        layer = model.model.layers[0]
        assert layer.mlp.down_proj._method.weight.nbytes * world == whole.model.layers[0].mlp.down_proj._method.weight.nbytes
        assert model.caches[0].shape[2] == max(model.config.num_kv_heads // world, 1)
    torch.testing.assert_close(ranks[0][0], expected, rtol=0, atol=2e-5)


def check_dense_kernels(name, device, checkpoint, play, tolerance):
    path, prompts = checkpoint(name), [prompt(1, 9), prompt(2, 4)]
    ops = replace(triton_ops(torch.float32), paged_attention=paged_attention_device)
    model = DeviceModel(path, torch.device(device), ops=ops).load(path)
    model.step({0: (prompts[0][:6], 6)}, padding=1)
    logits = model.step({0: (prompts[0], 3), 2: (prompts[1], 4)}, padding=2).cpu()
    expected = torch.stack([reference_logprobs(play, tokens) for tokens in prompts])
    torch.testing.assert_close(torch.log_softmax(logits, -1), expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.req("PERF-09")
@pytest.mark.parametrize("name", ["qwen3-windows", "gemma3", "phi3-longrope", "olmo2"])
def test_logits_are_the_same_with_tritons_dense_kernels(name, checkpoint, loaded, driver):
    check_dense_kernels(name, "cpu", checkpoint, driver(loaded(name)), 3e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_logits_on_a_gpu_are_those_of_the_cpu(name, checkpoint, loaded, driver):
    check_dense_kernels(name, "cuda", checkpoint, driver(loaded(name)), 3e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_can_be_built_and_stepped_where_there_is_no_memory(name, checkpoint):
    """On the device `meta` no value can be read: weights and tables are all there, and the host decides nothing by a value."""
    model = DeviceModel(checkpoint(name), torch.device("meta"))
    model.model.finish()
    logits = model.step({0: (prompt(1, 30), 30), 1: (prompt(2, 5), 1)}, padding=4)
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, VOCAB), torch.float32, "meta")


def test_a_tied_weight_is_there_once(checkpoint):
    path = checkpoint("llama-7to1-llama3-tied")
    model = DeviceModel(path).load(path).model
    assert model.lm_head._method.weight.data_ptr() == model.embed_tokens.weight.data_ptr()


def test_linear_layers_on_a_device_are_its_librarys():
    layer = LinearLayer("some_proj", (Projection("some_proj", Span(8, 0, 8), Span(24, 0, 24), 0),), True, torch.float16)
    method = linear_method(torch.float16, device_reference_ops(), device=torch.device("meta"))(layer)
    out = method.apply(torch.empty(1, 8, dtype=torch.float16, device="meta"))
    assert isinstance(method, DeviceLinearMethod) and (out.shape, out.device.type) == ((1, 24), "meta")


@pytest.mark.req("LO-01", "LO-02", "LO-13")
@pytest.mark.parametrize("name", ["llama", "phi3-longrope"])
def test_adapters_on_a_device_are_those_merged_into_the_weights(name, checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    path = checkpoint(name)
    load = partial(AutoModelForCausalLM.from_pretrained, path, attn_implementation="eager")
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if name.startswith("phi3") else ALL
    folders = [make_adapter(tmp_path / str(seed), load(), rank=4 * seed, seed=seed, modules=modules[:seed]) for seed in (2, 4)]
    slots = torch.full((256,), -1, dtype=torch.int32)
    config = LoraConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=16)
    lora = device_lora_runner(config, 4, DeviceLoraBatch(slots), lambda *shape, dtype: torch.empty(shape, dtype=dtype))
    model = DeviceModel(path, wrap=lambda method: lora.wrap(method, device_reference_ops()))
    lora.attach(model.model, lambda: model.model)
    model.load(path)
    for copy, folder in enumerate(folders):
        lora.read_adapter(copy, str(folder), None)
    lora._thread.shutdown()
    assert {copy: read.error for copy, read in lora.take_reads().items()} == {0: None, 1: None}
    lora.reset()
    lora.apply(
        StepPlan(
            step_id=1,
            released=empty(),
            admissions=[],
            append_rows=[],
            append_blocks=[],
            rows=empty(),
            num_new_tokens=empty(),
            samples=np.zeros(0, np.bool_),
            lora_loads=[SlotLoad(1, 0), SlotLoad(0, 1)],
        )
    )
    # Longer than what Phi-3 was made for, so that transformers takes the long factors too.
    prompts = [prompt(seed, 66) for seed in range(3)]
    slots[66:132], slots[132:198] = 1, 0
    given = torch.log_softmax(model.step({row: (tokens, 66) for row, tokens in enumerate(prompts)}, padding=2), -1)
    for models, tokens, found in zip([load(), *(merged(load(), folder) for folder in folders)], prompts, given, strict=True):
        with torch.no_grad():
            due = torch.log_softmax(models.float().eval()(torch.tensor([tokens])).logits[0, -1].float(), -1)
        torch.testing.assert_close(found, due, rtol=0, atol=1e-4)
