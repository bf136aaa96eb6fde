"""Tiny random checkpoints, and a driver that plays the scheduler with hand-made plans."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, LLAMA, MAX_MODEL_LEN
from warm_workers import fork_worker, warm

from penstock.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.core.plan import Admission, SampleInputs, SlotLoad, StepPlan, StepResult
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.parallel import local_node
from penstock.engine.quant.scheme import QuantizationName
from penstock.engine.runner import model_runner
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import REFERENCE

BLOCK_SIZE = 16
NUM_BLOCKS = 320


@pytest.fixture(autouse=True, scope="module")
def warm_workers() -> Iterator[None]:
    """The ranks of these tests are forked from a process that has torch, one a file."""
    with pytest.MonkeyPatch.context() as patch, warm():
        patch.setattr(local_node, "start_worker", fork_worker)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(name)`: the folder of one of CONFIGS with random weights; each made once."""
    transformers = pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def make(name: str, max_shard_size: str = "1GB") -> Path:
        key = f"{name}-{max_shard_size}"
        if key not in made:
            family, fields = CONFIGS[name]
            config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
            config = getattr(transformers, config_class)(
                **(LLAMA | {"max_position_embeddings": MAX_MODEL_LEN} | fields), eos_token_id=None, bos_token_id=None
            )
            torch.manual_seed(zlib.crc32(key.encode()))  # not by the order of the tests
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            for parameter_name, parameter in model.named_parameters():
                if any(part in parameter_name for part in ("norm", "bias", "sinks")):
                    torch.nn.init.normal_(parameter, 0.5, 0.3)
            made[key] = tmp_path_factory.mktemp(key)
            model.save_pretrained(made[key], max_shard_size=max_shard_size)
        return made[key]

    return make


def make_runner(
    path: Path,
    dtype: str = "float32",
    form: str = "best",
    scheduler: SchedulerConfig | None = None,
    lora: LoraConfig | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    speculative: SpeculativeConfig | None = None,
    kv_dtype: str = "auto",
    quantization: QuantizationName | None = None,
) -> ModelRunner:
    """A loaded runner with its cache; `form` is "best", an instruction set's name, or "reference": as without a compiler."""
    runner = ModelRunner(
        EngineConfig(
            model=read_model_config(
                path, served_names=(), dtype=dtype, kv_dtype=kv_dtype, max_model_len=max_model_len, quantization=quantization
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=scheduler or SchedulerConfig(max_num_seqs=16),
            lora=lora,
            speculative=speculative,
            cpu_isa=None if form in ("best", "reference") else form,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        if form == "reference":
            patch.setattr(model_runner, "ops_for", lambda device, dtype, isa: REFERENCE)
        runner.load()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


def runners(checkpoint: Callable[[str], Path]) -> Callable[..., ModelRunner]:
    """`get(name, dtype, form)`: one runner each, shared; a Driver starts afresh."""
    made: dict[tuple[str, str, str], ModelRunner] = {}

    def get(name: str, dtype: str = "float32", form: str = "best") -> ModelRunner:
        if (name, dtype, form) not in made:
            made[name, dtype, form] = make_runner(checkpoint(name), dtype, form)
        return made[name, dtype, form]

    return get


@pytest.fixture(scope="session")
def loaded(checkpoint) -> Callable[..., ModelRunner]:
    """`runners` for the whole run, which nobody warms up: each step calls the model."""
    return runners(checkpoint)


@pytest.fixture(scope="session")
def warmed(checkpoint) -> Callable[..., ModelRunner]:
    """`runners` for engines, which warm them up: steps may run from tapes."""
    return runners(checkpoint)


@pytest.fixture(scope="session")
def build_runner() -> Callable[..., ModelRunner]:
    """`make_runner`, for tests that need one of their own."""
    return make_runner


@dataclass
class Sequence:
    """A request as the driver sees it."""

    row: int
    tokens: list[int]
    tables: list[list[int]]
    """Per KV group, its blocks."""
    computed: int
    sampling: SamplingParams
    outputs: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """Of the first group."""
        return self.tables[0]


class Driver:
    """Plays the scheduler for one runner: gives out rows and blocks and counts tokens."""

    def __init__(self, runner: ModelRunner, seed: int = 0, poison: bool = True) -> None:
        self.runner = runner
        self._free = list(np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS)))
        self._rows = list(range(runner.config.scheduler.max_num_seqs))
        self._step = 0
        self._admissions: list[Admission] = []
        self.lora_loads: list[SlotLoad] = []
        self._appends: list[list[tuple[int, int]]] = [[] for _ in runner.kv_layout().groups]
        # Rows that earlier drivers left.
        self._released: list[int] = list(self._rows)
        if poison:
            for cache in runner.kv_caches:
                # In eight bits, the byte that is NaN in both formats of floating-point numbers and as a row's scale.
                cache.fill_(float("nan")) if cache.itemsize > 1 else cache.view(torch.uint8).fill_(0xFF)

    def admit(
        self,
        tokens: list[int],
        sampling: SamplingParams | None = None,
        cached: "Sequence | None" = None,
        blocks: int = 0,
        num_prompt_tokens: int | None = None,
        lora_slot: int = -1,
    ) -> Sequence:
        """Takes a row, with the first `blocks` blocks of another sequence where `cached` is given. All tokens are the prompt's
        unless said: a request that resumes has outputs as well."""
        sampling = sampling or SamplingParams(max_tokens=100, temperature=0.0)
        computed = blocks * BLOCK_SIZE if cached else 0
        sequence = Sequence(self._rows.pop(0), list(tokens), [[] for _ in self._appends], computed, sampling)
        known = np.array(tokens, np.int32)
        num_prompt_tokens = num_prompt_tokens or len(tokens)
        self._admissions.append(Admission(sequence.row, known, num_prompt_tokens, sequence.computed, sampling, lora_slot))
        for number in range(len(self._appends)):
            for block in cached.tables[number][:blocks] if cached else []:
                self._append(sequence, number, block)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Frees the row, not the blocks."""
        self._released.append(sequence.row)
        self._rows.insert(0, sequence.row)

    def plan(self, work: list[tuple[Sequence, int]]) -> StepPlan:
        """A step of so many tokens of each sequence; a sequence that reaches its last known token samples."""
        for sequence, count in work:
            for number, table in enumerate(sequence.tables):
                while len(table) * BLOCK_SIZE < sequence.computed + count:
                    self._append(sequence, number, int(self._free.pop()))
        samples = [sequence.computed + count == len(sequence.tokens) for sequence, count in work]
        self._step += 1
        plan = StepPlan(
            step_id=self._step,
            released=np.array(self._released, np.int32),
            admissions=self._admissions,
            append_rows=[np.array([row for row, _ in appends], np.int32) for appends in self._appends],
            append_blocks=[np.array([block for _, block in appends], np.int32) for appends in self._appends],
            rows=np.array([sequence.row for sequence, _ in work], np.int32),
            num_new_tokens=np.array([count for _, count in work], np.int32),
            samples=np.array(samples, np.bool_),
            lora_loads=self.lora_loads,
        )
        self.lora_loads = []
        self._released, self._admissions, self._appends = [], [], [[] for _ in self._appends]
        for sequence, count in work:
            sequence.computed += count
        return plan

    def step(self, work: list[tuple[Sequence, int]]) -> StepResult:
        """Plans, runs and samples; sampled tokens join their sequences."""
        plan = self.plan(work)
        self.runner.execute(plan)
        result = self.runner.sample(SampleInputs(plan.step_id))
        result = result if isinstance(result, StepResult) else result.result()  # a device's is still on its way
        for (sequence, _), token, count in zip(work, result.token_ids[:, 0].tolist(), result.counts.tolist(), strict=True):
            sequence.tokens += [token] * count
            sequence.outputs += [token] * count
        return result

    def generate(self, sequence: Sequence, count: int, chunk: int = 10**6) -> list[int]:
        """Runs one sequence alone, `chunk` tokens a step at most, until it has `count` outputs."""
        while len(sequence.outputs) < count:
            self.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))])
        return sequence.outputs

    def _append(self, sequence: Sequence, number: int, block: int) -> None:
        sequence.tables[number].append(block)
        self._appends[number].append((sequence.row, block))


@pytest.fixture
def driver() -> type[Driver]:
    """The class."""
    return Driver
