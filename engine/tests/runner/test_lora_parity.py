"""Adapters on a real runner: logits and tokens as with merged weights, alone and in one batch with others."""

import json
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from lora_adapters import ALL, make_adapter, merged
from safetensors.torch import load_file, save_file

from penstock.engine.config import LoraConfig
from penstock.engine.core.executor import AdapterRead
from penstock.engine.core.plan import SlotLoad
from penstock.engine.runner.memory_profile import PeakMemory
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.sampling import SamplingParams

VOCAB, OUTPUTS = 257, 6
ALL_LOGPROBS = SamplingParams(max_tokens=100, temperature=0.0, logprobs=VOCAB)
FAMILIES = ["llama", "qwen3", "qwen2-yarn", "gemma3", "olmo2", "phi3-longrope", "glm4", "cohere2", "qwen3-moe"]


@pytest.fixture(scope="module")
def reference(checkpoint):
    transformers = pytest.importorskip("transformers")

    def load(name: str):
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), attn_implementation="eager").float().eval()

    return load


@pytest.fixture(scope="module")
def lora_runner(checkpoint, build_runner):
    """`lora_runner(name, dtype)`: with three slots of rank 16; one each."""
    made: dict[tuple[str, str], ModelRunner] = {}

    def get(name: str, dtype: str = "float32") -> ModelRunner:
        if (name, dtype) not in made:
            lora = LoraConfig(max_loras=3, max_cpu_loras=8, max_lora_rank=16)
            made[name, dtype] = build_runner(checkpoint(name), dtype, lora=lora)
        return made[name, dtype]

    return get


def read(runner: ModelRunner, copy: int, path: Path) -> str | None:
    return completed(runner, copy, path).error


def completed(runner: ModelRunner, copy: int, path: Path) -> AdapterRead:
    runner.read_adapter(copy, str(path), None)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if reads := runner.take_reads():
            return reads[copy]
        time.sleep(0.002)
    raise AssertionError("the adapter was not read")


def prompt(seed: int, length: int = 80) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def modules_of(name: str) -> tuple[str, ...]:
    if name == "qwen3-moe":
        return ("q_proj", "k_proj", "v_proj", "o_proj")  # experts take no adapter
    if name == "glm4":
        return ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    return ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if name.startswith("phi3") else ALL


def logprobs(result, at: int) -> torch.Tensor:
    row = result.logprobs.plan_rows.tolist().index(at)
    found = torch.empty(VOCAB)
    found[torch.tensor(result.logprobs.top_ids[row]).long()] = torch.tensor(result.logprobs.top_logprobs[row])
    return found


@torch.no_grad()
def expected_logprobs(model, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)


@pytest.mark.slow
@pytest.mark.req("LO-01", "LO-02", "LO-03", "LO-10", "LO-13")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_batch_is_each_adapter_merged_into_the_weights(name, lora_runner, reference, driver, tmp_path):
    runner, modules = lora_runner(name), modules_of(name)
    some = [module for module in modules if module in ("q_proj", "v_proj", "qkv_proj", "down_proj")]
    paths = [
        make_adapter(tmp_path / "all", reference(name), rank=4, seed=1, modules=modules),
        make_adapter(tmp_path / "some", reference(name), rank=16, seed=2, modules=tuple(some), use_rslora=True),
    ]
    for copy, path in enumerate(paths):
        assert read(runner, copy, path) is None
    models = [reference(name), *(merged(reference(name), path) for path in paths)]
    slots, play = [-1, 2, 0, 2], driver(runner)
    play.lora_loads = [SlotLoad(2, 0), SlotLoad(0, 1)]
    sequences = [play.admit(prompt(at), ALL_LOGPROBS, lora_slot=slot) for at, slot in enumerate(slots)]
    play.step([(sequence, 57 + at) for at, sequence in enumerate(sequences)])
    results = [play.step([(sequence, 23 - at) for at, sequence in enumerate(sequences)])]
    results += [play.step([(sequence, 1) for sequence in reversed(sequences)])]
    for step, result in enumerate(results):
        for at, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
            model = models[{-1: 0, 2: 1, 0: 2}[slot]]
            due = expected_logprobs(model, sequence.tokens[: 80 + step])
            torch.testing.assert_close(logprobs(result, at if step == 0 else 3 - at), due, rtol=0, atol=3e-4)
    assert not torch.allclose(expected_logprobs(models[0], prompt(1)), expected_logprobs(models[1], prompt(1)), atol=0.1)


@pytest.mark.req("LO-01", "LO-03", "LO-04")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_requests_bits_are_those_that_it_has_alone(dtype, lora_runner, build_runner, checkpoint, reference, driver, tmp_path):
    """And those without an adapter have the bits of an engine that serves none."""
    runner = lora_runner("llama", dtype)
    for copy, rank in enumerate((3, 16)):
        assert read(runner, 10 + copy, make_adapter(tmp_path / str(copy), reference("llama"), rank=rank, seed=copy)) is None
    plain = driver(build_runner(checkpoint("llama"), dtype))
    alone = [plain.generate(plain.admit(prompt(0), ALL_LOGPROBS), OUTPUTS)]
    for slot in (0, 1):
        play = driver(runner)
        play.lora_loads = [SlotLoad(slot, 10 + slot)]
        alone.append(play.generate(play.admit(prompt(slot + 1), ALL_LOGPROBS, lora_slot=slot), OUTPUTS, chunk=7))
    together = driver(runner)
    together.lora_loads = [SlotLoad(2, 10), SlotLoad(0, 11)]
    sequences = [together.admit(prompt(at), ALL_LOGPROBS, lora_slot=slot) for at, slot in enumerate((-1, 2, 0))]
    together.step([(sequence, 80) for sequence in sequences])
    while len(sequences[0].outputs) < OUTPUTS:
        together.step([(sequence, 1) for sequence in sequences])
    assert [sequence.outputs for sequence in sequences] == alone
    last = together.step([(sequences[0], 1)])
    plain_sequence = plain.admit(sequences[0].tokens[:-1], ALL_LOGPROBS)
    first = plain.step([(plain_sequence, len(plain_sequence.tokens))])
    assert torch.equal(logprobs(last, 0), logprobs(first, 0))


@pytest.mark.req("LO-07")
def test_a_slot_that_changes_hands_holds_nothing_of_the_one_before(lora_runner, reference, driver, tmp_path):
    runner, model = lora_runner("llama"), reference("llama")
    wide = make_adapter(tmp_path / "wide", model, rank=16, seed=3)
    narrow = make_adapter(tmp_path / "narrow", model, rank=2, seed=4, modules=("v_proj",))
    assert [read(runner, 20, wide), read(runner, 21, narrow)] == [None, None]
    outputs = []
    for copies in ([21], [20, 21]):
        play = driver(runner)
        for copy in copies:
            play.lora_loads = [SlotLoad(1, copy)]
            sequence = play.admit(prompt(7), ALL_LOGPROBS, lora_slot=1)
            outputs.append(play.generate(sequence, OUTPUTS))
            play.release(sequence)
    assert outputs[0] == outputs[2] != outputs[1]


def test_memory_for_a_step_is_measured_with_an_adapter_of_the_greatest_rank(build_runner, checkpoint, monkeypatch):
    runner = build_runner(checkpoint("llama"), lora=LoraConfig(max_lora_rank=64))
    apply, seen = runner._lora.apply, []

    def spy(plan):
        apply(plan)
        seen.append([slot for slot, _ in runner._lora._batch.segments()])

    monkeypatch.setattr(runner._lora, "apply", spy)
    foretold = runner.profile_memory()
    assert seen and all(slots == [0] for slots in seen)
    assert all(shelf.ranks.tolist() == [64] for shelf in runner._lora._shelves.values())
    with PeakMemory() as memory:
        runner._dummy_step(512, 16)
    assert memory.peak <= foretold


def broken(path: Path, change) -> Path:
    config, tensors = json.loads((path / "adapter_config.json").read_text()), load_file(path / "adapter_model.safetensors")
    change(config, tensors)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


LAYER = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{LAYER}.lora_{factor}.weight" for factor in "AB")


def _with(**fields):
    return lambda config, tensors: config.update(fields)


def _tensor(name, value):
    return lambda config, tensors: tensors.update({name: value})


@pytest.mark.req("LO-04")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with(use_dora=True), "use_dora"),
        (_with(modules_to_save=["lm_head"]), "modules_to_save"),
        (_with(bias="lora_only"), "bias is 'lora_only'"),
        (_with(peft_type="IA3"), "peft_type is 'IA3'"),
        (_with(init_lora_weights="pissa_niter_4"), "pissa_niter_4"),
        (_with(target_modules=["q_proj", "lm_head"]), "target_modules has lm_head"),
        (_with(r=0), "r must be"),
        (_with(lora_alpha="x"), "lora_alpha must be"),
        (_tensor("base_model.model.lm_head.lora_embedding_A", torch.zeros(2, 2)), "lora_embedding_A is not supported"),
        (_tensor(f"base_model.model.{LAYER}.lora_magnitude_vector", torch.zeros(2)), "lora_magnitude_vector"),
        (_tensor("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", torch.zeros(2, 2)), "lora_A alone"),
        (_tensor(A, torch.zeros(4, 63)), "do not fit the model's weight"),
        (_tensor(B, torch.full((64, 4), float("nan"))), "not finite"),
        (_tensor(A, torch.zeros(4, 64, dtype=torch.int32)), "floating point"),
        (lambda config, tensors: tensors.clear(), "holds no LoRA weights"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(change, words, lora_runner, reference, tmp_path):
    path = broken(make_adapter(tmp_path / "adapter", reference("llama")), change)
    error = read(lora_runner("llama"), 30, path)
    assert error is not None and words in error


def test_an_adapter_on_experts_is_refused(lora_runner, reference, tmp_path):
    path = make_adapter(tmp_path / "adapter", reference("qwen3-moe"), modules=("q_proj",))
    tensors = load_file(path / "adapter_model.safetensors")
    module = "base_model.model.model.layers.1.mlp.experts.0.up_proj"
    tensors |= {f"{module}.lora_A.weight": torch.zeros(4, 64), f"{module}.lora_B.weight": torch.zeros(40, 4)}
    save_file(tensors, path / "adapter_model.safetensors")
    error = read(lora_runner("qwen3-moe"), 30, path)
    assert error is not None and "experts.0.up_proj" in error


def test_other_ways_to_be_no_adapter(lora_runner, reference, tmp_path):
    runner, model = lora_runner("llama"), reference("llama")
    assert "rank 17 is above --max-lora-rank 16" in read(runner, 30, make_adapter(tmp_path / "wide", model, rank=17))
    assert "does not exist" in read(runner, 31, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no adapter_config.json" in read(runner, 32, tmp_path / "empty")
    pickled = make_adapter(tmp_path / "pickled", model)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    assert "adapter_model.bin would have to be unpickled" in read(runner, 33, pickled)
    damaged = make_adapter(tmp_path / "damaged", model)
    (damaged / "adapter_model.safetensors").write_bytes(b"\x08" + bytes(15))
    assert "damaged" in read(runner, 34, damaged)


def test_a_modules_own_alpha_is_used(lora_runner, reference, driver, tmp_path):
    runner, model = lora_runner("llama"), reference("llama")
    plain = make_adapter(tmp_path / "plain", model, seed=5, modules=("q_proj",), lora_alpha=12)
    pattern = make_adapter(tmp_path / "pattern", model, seed=5, modules=("q_proj",), alpha_pattern={"self_attn.q_proj": 12})
    assert [read(runner, 40, plain), read(runner, 41, pattern)] == [None, None]
    host = runner._lora._host
    assert all(torch.equal(host[40][module].b, host[41][module].b) for module in host[40])


def test_the_digest_of_an_adapter_follows_its_weights_and_its_scale(lora_runner, reference, tmp_path):
    runner, model = lora_runner("llama"), reference("llama")
    fields = [{"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "lora_alpha": 10}]
    folders = [make_adapter(tmp_path / str(at), model, rank=4, **field) for at, field in enumerate(fields)]
    first, same, other, scaled = [completed(runner, 60 + at, folder).digest for at, folder in enumerate(folders)]
    assert first and first == same and len({first, other, scaled}) == 3


@pytest.mark.req("LO-14")
def test_the_scale_is_in_the_weights_that_a_slot_holds(lora_runner, reference, tmp_path):
    runner, model = lora_runner("llama"), reference("llama")
    path = make_adapter(tmp_path / "scaled", model, rank=4, lora_alpha=10)
    assert read(runner, 50, path) is None
    b = load_file(path / "adapter_model.safetensors")[B]
    torch.testing.assert_close(runner._lora._host[50][LAYER].b, b * 2.5)


def test_new_weights_leave_empty_slots_and_the_adapters_in_place(checkpoint, build_runner, reference, driver, tmp_path):
    runner = build_runner(checkpoint("llama"), lora=msgspec.convert({"max_lora_rank": 8}, LoraConfig))
    assert read(runner, 0, make_adapter(tmp_path / "adapter", reference("llama"))) is None
    outputs = []
    for _ in range(2):
        play = driver(runner)
        play.lora_loads = [SlotLoad(0, 0)]
        outputs.append(play.generate(play.admit(prompt(3), lora_slot=0), OUTPUTS))
        runner.reload_weights(None)
    assert outputs[0] == outputs[1]
