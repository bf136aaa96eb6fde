"""A whole core over the stages of a pipeline: the tokens and the log probabilities of one process."""

import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from grids import mostly_slow
from lettered_model import LETTERS, with_letters
from lora_adapters import make_adapter
from safetensors.torch import load_file, save_file
from stages_here import Stages
from test_core_with_runner import SCHEDULER, Engine, requests

from penstock.engine.commands import Command, LoadAdapter, ReloadWeights
from penstock.engine.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    EplbConfig,
    LoraConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import Executor
from penstock.engine.core.ipc.coupling import Coupling
from penstock.engine.core.ipc.process import build_executor
from penstock.engine.core.memory import OffloadSize
from penstock.engine.core.plan import SampledTokens, SampleInputs
from penstock.engine.grammar import Grammar
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.safetensors import check_weights
from penstock.engine.messages import AddRequest, Control
from penstock.engine.models.layers.shard import Stage
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.links import Link
from penstock.engine.parallel.process_executor import ProcessExecutor
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.sampling import SamplingParams
from penstock.kernels.cpu.tape import Tape

NUM_BLOCKS = 100
EPLB = EplbConfig(window_size=4, step_interval=4, num_redundant_experts=1)
NAMES = [
    "llama",
    "qwen3-windows",
    "gemma3",
    "llama-7to1-llama3-tied",
    "cohere2",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v3",
    "starcoder2",
]


def config_of(path: Path, stages: int, ranks: int = 1, timeout: float = 30.0, **fields: Any) -> EngineConfig:
    return EngineConfig(
        model=read_model_config(path, served_names=(), dtype="float32", max_model_len=320),
        cache=CacheConfig(block_size=16, num_blocks=NUM_BLOCKS),
        scheduler=msgspec.structs.replace(SCHEDULER, pipeline_stages=stages, **fields.pop("scheduler", {})),
        parallel=ParallelConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages, timeout=timeout),
        depth=stages,
        **fields,
    )


class StagedEngine(Engine):
    """A new core on ranks that are there already."""

    def __init__(
        self, config: EngineConfig, executor: Executor, num_blocks: int = NUM_BLOCKS, offload: OffloadSize | None = None
    ) -> None:
        self.executor, self.depth = executor, config.depth
        executor.call("warm_up")  # nobody is in any row
        self.scores, self.logprobs = {}, {}
        groups = executor.call("kv_layout")[0].groups
        self.core = EngineCore(config, executor, num_blocks, epoch=1, groups=groups, offload=offload)

    def _check_mirror(self) -> None:
        """The rows are in other processes."""


@pytest.fixture
def staged(request, checkpoint):
    """`staged(name, stages, ranks)`: a configuration and its processes."""

    def make(name: str, stages: int, ranks: int = 1, **fields: Any) -> tuple[EngineConfig, Executor]:
        config = config_of(checkpoint(name), stages, ranks, **fields)
        executor, blocks = build_executor(config)
        request.addfinalizer(executor.close)
        assert blocks == NUM_BLOCKS
        return config, executor

    return make


def with_logprobs(batch: list[AddRequest]) -> list[AddRequest]:
    replace = msgspec.structs.replace
    return [replace(it, sampling=replace(it.sampling, logprobs=2, prompt_logprobs=1)) for it in batch]


@pytest.mark.req("DX-09")
@pytest.mark.parametrize("name", mostly_slow(NAMES, ("llama", "qwen3-windows", "deepseek-v3")))
def test_two_stages_answer_as_one_process_does(name, staged, warmed):
    """Bit by bit: the same operations in other processes."""
    whole = Engine(warmed(name), 1, NUM_BLOCKS)
    expected = whole.run(with_logprobs(requests(adjusted=False)))
    config, executor = staged(name, 2)
    engine = StagedEngine(config, executor)
    assert engine.run(with_logprobs(requests(adjusted=False))) == expected
    assert engine.logprobs.keys() == whole.logprobs.keys()
    for index, found in engine.logprobs.items():
        np.testing.assert_allclose(found, whole.logprobs[index], rtol=1e-5, atol=1e-5)


@pytest.mark.req("DX-02", "DX-13", "DX-21")
@pytest.mark.parametrize("eplb", mostly_slow([None, EPLB], (EPLB,)))
def test_the_ranks_of_each_stage_divide_its_experts(request, checkpoint, warmed, eplb):
    """Each whole, among themselves alone: the stages are at different steps. Experts that move change no stream."""
    config = config_of(checkpoint("mixtral"), 2, 2)
    parallel = msgspec.structs.replace(config.parallel, expert_parallel=True, eplb=eplb)
    config = msgspec.structs.replace(config, parallel=parallel)
    coupling = Coupling(config.parallel)
    request.addfinalizer(coupling.close)
    executor, _ = build_executor(config, experts=coupling.experts(0))
    request.addfinalizer(executor.close)
    batch = requests(adjusted=False)[:4]
    engine = StagedEngine(config, executor)
    assert engine.run(batch) == Engine(warmed("mixtral"), 1, NUM_BLOCKS).run(batch)
    stages, told = executor.call_beside("expert_stats")[::2], engine.core.stats().experts
    if eplb is not None:
        assert all(it.rebalances > 0 and it.moved_bytes > 0 for it in stages)
        assert told is not None and told.moved_bytes == sum(it.moved_bytes for it in stages)
        assert told.served == [sum(it.served[rank] for it in stages) for rank in range(2)]
    else:
        assert told is None


@pytest.mark.parametrize(("stages", "ranks", "few"), [(2, 2, 44), (3, 1, 48)])
def test_preemption_adjustments_and_the_prefix_cache(stages, ranks, few, staged, warmed):
    name = "qwen3-windows"
    config, executor = staged(name, stages, ranks)
    for adjusted in (False, True):
        expected = Engine(warmed(name), 1, NUM_BLOCKS).run(requests(adjusted))
        num_blocks = few if adjusted else NUM_BLOCKS
        engine = StagedEngine(config, executor, num_blocks)
        assert engine.run(requests(adjusted)) == expected
        stats = engine.core.stats()
        assert stats.prefix_hits > 0 and (stats.preemptions > 0) == adjusted


def test_drafts_are_verified_by_all_stages(staged, warmed):
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    limits = {"num_speculative_tokens": 3, "num_lookahead_tokens": 3}
    config, executor = staged("llama", 2, speculative=speculative, scheduler=limits)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    batch = [AddRequest(index, f"r{index}", [5, 6, 7, 8] * 8 + [index], params, 0.0) for index in range(4)]
    engine = StagedEngine(config, executor)
    assert engine.run(batch) == Engine(warmed("llama"), 1, NUM_BLOCKS).run(batch)
    assert sum(engine.core.stats().step.drafts.accepted) > 0


def test_grammars_hold_in_a_pipeline(checkpoint, tmp_path, build_runner):
    """Masks reach the last stage, and the tokens that a grammar forces are rows of every stage."""
    path = with_letters(checkpoint("llama"), tmp_path / "model")
    form = Grammar("regex", r"(record-[0-9]{2}-of-[a-z]-){9}", "structured_outputs.regex")
    batch = [msgspec.structs.replace(it, grammar=form if it.index % 2 else None) for it in requests(adjusted=False)]
    executor, _ = build_executor(config_of(path, 2))
    staged, whole = StagedEngine(config_of(path, 2), executor), Engine(build_runner(path), 1, NUM_BLOCKS)
    try:
        streams = staged.run(batch)
        assert streams == whole.run(batch)
    finally:
        executor.close()
        for engine in (staged, whole):
            engine.core._grammars.close()
    guided = [index for index in streams if index % 2]
    assert guided and all("".join(LETTERS[token] for token in streams[index]).startswith("record-") for index in guided)


LORA = LoraConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=8)


def loaded_adapter(engine: Engine, name: str, path: Path) -> str | None:
    """Why it was refused; None: it was not."""
    return told(engine, LoadAdapter(name, str(path)))


def told(engine: Engine, command: Command) -> str | None:
    """Why a command was refused; None: it was not."""
    engine.core.handle(Control(1, command))
    while not (replies := engine.core.take_replies()):
        engine.core.step()
    return replies[0].error


@pytest.mark.req("DX-09")
@pytest.mark.parametrize("ranks", mostly_slow([1, 2], (2,)))
def test_adapters_are_on_the_layers_of_every_stage(ranks, staged, checkpoint, build_runner, tmp_path):
    """Three take turns in two slots and two places of host memory; one is on layers of the last stage alone."""
    transformers = pytest.importorskip("transformers")
    target = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    paths = [make_adapter(tmp_path / str(at), target, rank=2 + at, seed=at, scale=0.5) for at in range(3)]
    late = {name: value for name, value in load_file(paths[2] / "adapter_model.safetensors").items() if ".layers.1." in name}
    save_file(late, paths[2] / "adapter_model.safetensors")
    wrong = make_adapter(tmp_path / "wrong", target)
    save_file(late | {name: torch.zeros(4, 63) for name in late if "lora_A" in name}, wrong / "adapter_model.safetensors")
    batch = [msgspec.structs.replace(it, lora_id=it.index % 4) for it in requests(adjusted=False)]
    config, executor = staged("llama", 2, ranks, lora=LORA)
    whole = build_runner(checkpoint("llama"), scheduler=SCHEDULER, lora=LORA)
    found = list[dict[int, list[int]]]()
    for engine in (Engine(whole, 1, NUM_BLOCKS), StagedEngine(config, executor)):
        assert [loaded_adapter(engine, f"a{at}", path) for at, path in enumerate(paths)] == [None] * 3
        assert "model.layers.1" in loaded_adapter(engine, "wrong", wrong) and engine.core.adapters()[-1].name == "a2"
        found.append(engine.run(batch))
    assert found[0] == found[1]
    plain = StagedEngine(config, executor).run(requests(adjusted=False))
    changed = [index for index in plain if plain[index] != found[1][index]]
    assert {index % 4 for index in changed} == {1, 2, 3} and not [index for index in changed if index % 4 == 0]


def test_a_checkpoint_that_lacks_a_tensor_of_one_stage_changes_nothing(checkpoint, warmed, tmp_path):
    """It is refused by the tensor's name, before the other stage gives its weights up. The engine goes on, and takes another."""
    config = config_of(checkpoint("llama"), 2)
    engine, batch = StagedEngine(config, Stages(config)), requests(adjusted=False)[:3]
    expected = Engine(warmed("llama"), 1, NUM_BLOCKS).run(batch)
    assert engine.run(batch) == expected
    shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    turned = {name: value.roll(1, 0) for name, value in tensors.items()}
    for lacking in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        save_file({name: value for name, value in turned.items() if name != lacking}, tmp_path / "copy" / "model.safetensors")
        assert f"lacks the tensors {lacking}" in str(told(engine, ReloadWeights(str(tmp_path / "copy"))))
        assert engine.run(batch) == expected
    save_file(turned, tmp_path / "copy" / "model.safetensors")
    assert told(engine, ReloadWeights(str(tmp_path / "copy"))) is None
    assert engine.run(batch) != expected


def test_a_start_is_refused_where_one_stage_lacks_a_tensor(checkpoint, tmp_path):
    """As one process refuses it: bad input, and no failure of the engine."""
    path = tmp_path / "copy"
    shutil.copytree(checkpoint("llama"), path)
    tensors = load_file(path / "model.safetensors")
    lacking = "model.layers.1.mlp.up_proj.weight"
    save_file({name: value for name, value in tensors.items() if name != lacking}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"rank 1 alone has refused load: .* lacks the tensors {re.escape(lacking)}"):
        build_executor(config_of(path, 2))


@pytest.mark.req("DX-10")
def test_every_stage_has_a_plan_and_no_request_two(staged):
    config, executor = staged("llama", 2)
    engine = StagedEngine(config, executor)
    params = SamplingParams(max_tokens=30, temperature=0.0)
    for index in range(6):
        engine.core.handle(AddRequest(index, f"r{index}", [5, 6, 7, index], params, 0.0))
    in_flight, full, turns, busy = list[set[int]](), 0, 0, 0
    submit, collect = executor.submit, executor.collect

    def submitted(plan, masked):
        decodes = set(plan.rows[plan.samples].tolist())
        assert not any(decodes & rows for rows in in_flight), "a request is in two plans"
        in_flight.append(decodes)
        submit(plan, masked)

    def collected():
        nonlocal full, turns, busy
        full += len(in_flight) == 2 and min(map(len, in_flight)) == 3
        turns, busy = turns + 1, busy + len(in_flight)
        in_flight.pop(0)
        return collect()

    executor.submit, executor.collect = submitted, collected
    while engine.core.has_work:
        engine.core.step()
    assert full > 50, "a stage had nothing to do"
    idle, bubble = 1 - busy / (2 * turns), 1 / (1 + turns)
    assert idle <= 2 * bubble, "of the stages' turns, those that they fill and empty the pipeline in"


@pytest.mark.req("DX-24")
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_is_killed_or_stopped_ends_the_group_by_name(number, stage, staged):
    config, executor = staged("llama", 2, timeout=2.0)
    assert isinstance(executor, ProcessExecutor)
    engine = StagedEngine(config, executor)
    engine.core.handle(AddRequest(0, "r", [5, 6, 7], SamplingParams(max_tokens=200, temperature=0.0), 0.0))
    for _ in range(5):
        engine.core.step()
    pids = executor.pids
    os.kill(pids[stage], number)
    how = "was killed by signal 9" if number == signal.SIGKILL else "hangs: nothing has moved for 2 seconds"
    with pytest.raises(GroupFailed, match=re.escape(f"rank {stage} (process {pids[stage]}) {how}")):
        for _ in range(200):
            engine.core.step()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_a_stage_loads_its_own_layers_and_keeps_their_pages(checkpoint, build_runner):
    """Of tensors and pages that are there, not of what was asked for."""
    path = checkpoint("qwen3-windows")
    whole = build_runner(path)
    stages = [runner_of(path, Stage(number, 2)) for number in range(2)]
    names = [{tensor.name for tensor in check_weights(runner.model, path)} for runner in stages]
    assert names[0] | names[1] == {tensor.name for tensor in check_weights(whole.model, path)} and not names[0] & names[1]
    pages = [runner.kv_layout().page_bytes for runner in stages]
    assert max(pages) <= whole.kv_layout().page_bytes
    layouts = [runner.kv_layout().groups for runner in (whole, *stages)]
    tables = [[(group.block_size, group.window) for group in groups] for groups in layouts]
    assert tables[0] == tables[1] == tables[2]
    layers = [sorted(layer for group in groups for layer in group.layers) for groups in layouts]
    assert sorted(layers[1] + layers[2]) == layers[0]


def test_stages_run_from_tapes(checkpoint, build_runner, driver, monkeypatch):
    """Two stages in one process, whose decode steps are recorded and done again: with the tokens of one runner."""
    path, link, runs = checkpoint("qwen3"), Link(), Counter[int]()
    stages = [runner_of(path, Stage(number, 2), link) for number in range(2)]
    if stages[0].ops.tape is None:
        pytest.skip("no compiled operations")
    tape_run = Tape.run
    monkeypatch.setattr(Tape, "run", lambda self: runs.update([id(self)]) or tape_run(self))

    def outputs(runners: list[ModelRunner]) -> list[int]:
        for runner in runners:
            runner.initialize_kv_cache(NUM_BLOCKS)
            runner.warm_up()
        runs.clear()
        drive = driver(runners[0], poison=False)
        sequence = drive.admit([5, 6, 7, 8, 9])
        for _ in range(10):
            plan = drive.plan([(sequence, len(sequence.tokens) - sequence.computed)])
            for runner in runners:
                runner.execute(plan)
                result = runner.sample(SampleInputs(plan.step_id))
            for runner in runners[:-1]:
                runner.follow(SampledTokens(plan.step_id, result.token_ids, result.counts, None))
            sequence.tokens += result.token_ids[0].tolist()
        return sequence.tokens

    found = outputs(stages)
    assert list(runs.values()) == [8, 8], "each stage records its first decode step"
    assert found == outputs([build_runner(path, "float32")])


def runner_of(path: Path, stage: Stage, link: Link | None = None) -> ModelRunner:
    """The runner of one stage; without a link no other one is connected to it."""
    memory = SharedMemory.create(1)
    link = link or Link()
    ends = (None, link.sender) if stage.first else (link.receiver, None)
    runner = ModelRunner(config_of(path, 2), Group(0, 1, memory, "", 1.0, None, stage, *ends))
    runner.load()
    return runner
