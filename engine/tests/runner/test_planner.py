"""What `penstock plan` says of layouts: its arithmetic is that of the engine's ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from draft_heads import DRAFT_VOCAB, ReferenceHead, save_head

from penstock.engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.config import DecoderConfig, parse_decoder_config
from penstock.engine.models.cost import embedding_bytes, layer_weights, lm_head_bytes, stage_sizes
from penstock.engine.models.layers.shard import Shard, Stage
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.planner.cli import plan
from penstock.engine.planner.planner import Device, Estimate, Parallelism, Refusal, _Rank, best, estimate, layouts
from penstock.engine.roofline import Ceilings
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.spec.checkpoint import DraftCheckpoint

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTURE = LLAMA_70B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SCHEDULER = SchedulerConfig()
H100 = Device(80 << 30, Ceilings(bytes_per_s=3.35e12, flops_per_s=989e12), 10e-6)


def settings(path: Path, **parallel: int) -> tuple[EngineConfig, DecoderConfig]:
    model = read_model_config(path, served_names=(), load_format="dummy", dtype="float32")
    cache = CacheConfig(memory_utilization=0.9)
    config = EngineConfig(model=model, cache=cache, scheduler=SCHEDULER, device="cuda", parallel=ParallelConfig(**parallel))
    return config, parse_decoder_config(read_object(path / "config.json"))


def written(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    assert plan([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "deepseek-v3", "gemma3", "starcoder2"])
def test_the_bytes_are_those_of_the_checkpoint(name, checkpoint):
    """Every matrix is counted once, whichever family; norms, biases and corrections are not counted."""
    path = checkpoint(name)
    config = parse_decoder_config(read_object(path / "config.json"))
    stored = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        stored += sum(4 * _count(it["shape"]) for it in header.values() if len(it["shape"]) > 1)
    layers = [sum(layer_weights(config, layer, "float32")) for layer in range(config.num_layers)]
    head = 0 if config.tie_word_embeddings else lm_head_bytes(config, "float32")
    counted = sum(layers) + embedding_bytes(config, "float32") + head
    # Vocabularies and shared gates of tiny models apart, nothing is missing.
    assert counted == pytest.approx(stored, rel=0.005)
    for world in (2, 4):
        try:
            parts = [layer_weights(config, 0, "float32", shard=Shard(rank, world)) for rank in range(world)]
        except ValueError:
            continue
        assert layers[0] <= sum(map(sum, parts)) < world * layers[0], "a part each, and some of it on every rank"


def _count(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@pytest.mark.parametrize("name", ["llama", "qwen3-windows", "deepseek-v3"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_the_pages_are_those_of_a_rank(name, ranks, stages, checkpoint):
    path = checkpoint(name)
    engine, config = settings(path, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    if name == "deepseek-v3" and ranks > 1:
        ranks = 3  # its heads
    stage = Stage(0, stages)
    sizes = stage_sizes(config, engine.model.dtype, engine.model.stored_quantization)
    rank = _Rank(engine, config, Shard(0, ranks), stage.layers(sizes), None, stage)
    memory = SharedMemory.create(ranks)
    runner = ModelRunner(msgspec.structs.replace(engine, device="cpu"), Group(0, ranks, memory, "", 1.0, stage=stage))
    assert rank.layout == runner.kv_layout()


@pytest.fixture
def drafting(checkpoint, tmp_path):
    """`drafting(method)`: a target with something that drafts for it, and its configuration."""

    def make(method: str, **parallel: int) -> tuple[EngineConfig, DecoderConfig, DraftCheckpoint]:
        path, folder, fields = checkpoint("qwen3-windows"), None, dict[str, Any]()
        if method == "mtp":
            fields = {"num_nextn_predict_layers": 1}
            path = written(tmp_path / "target", read_object(checkpoint("llama") / "config.json") | fields)
        elif method == "draft_model":
            folder = checkpoint("llama")
        else:
            head = ReferenceHead(eagle3=method == "eagle3")
            extra = {"draft_vocab_size": DRAFT_VOCAB} if head.eagle3 else {}
            folder = save_head(tmp_path / method, head.tensors(), **extra)
        engine, config = settings(path, **parallel)
        speculative = SpeculativeConfig(method=method, num_speculative_tokens=3, model=folder)
        engine = msgspec.structs.replace(engine, speculative=speculative)
        drafter = DraftCheckpoint.read(speculative, engine.model)
        assert drafter is not None
        return engine, config, drafter

    return make


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_what_drafts_takes_its_weights_and_pages_on_every_rank_of_the_last_stage(method, drafting):
    """As the runner has it: its layers, its pages, and where the last stage ends."""
    engine, config, drafter = drafting(method, pipeline_parallel_size=2)
    drafts = drafter.step_bytes(engine.speculative, engine.model.dtype, 1)
    spans = [Stage(at, 2).layers(stage_sizes(config, engine.model.dtype, None, drafts)) for at in range(2)]
    ranks = [_Rank(engine, config, Shard(0, 1), spans[at], None, Stage(at, 2), drafter) for at in range(2)]
    memory, on_cpu = SharedMemory.create(1), msgspec.structs.replace(engine, device="cpu")
    for at, rank in enumerate(ranks):
        runner = ModelRunner(on_cpu, Group(0, 1, memory, "", 1.0, stage=Stage(at, 2)))
        assert rank.layout == runner.kv_layout()
    runner.load()
    held = [weight.shape for weight in runner.draft_model.weights().values() if len(weight.shape) > 1]
    plain = _Rank(engine, config, Shard(0, 1), spans[1], None, Stage(1, 2))
    borrowed = 0 if drafter.head is None or drafter.head.has_embedding else embedding_bytes(config, "float32")
    assert ranks[1].weight_bytes - plain.weight_bytes - borrowed == 4 * sum(map(_count, held))
    told = [estimate(engine, config, Parallelism(pipeline=2), H100, 64, drafter=it) for it in (None, drafter)]
    assert all(isinstance(it, Estimate) for it in told) and told[1].kv_blocks < told[0].kv_blocks


def test_the_command_counts_a_draft_model(tmp_path, capsys):
    target, draft = written(tmp_path / "target", LLAMA_70B), written(tmp_path / "draft", LLAMA_70B | {"num_hidden_layers": 8})
    flags = ["--spec-method", "draft_model", "--spec-model", draft, "--spec-tokens", 2]
    plain, drafting = (said(capsys, target, "--devices", 8, *more)["layouts"] for more in ([], flags))
    (before,), (after,) = ([it for it in each if it["parallelism"]["tensor"] == 8] for each in (plain, drafting))
    layer, table = (8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672) * 2, 128256 * 8192 * 2
    assert after["weight_bytes"] - before["weight_bytes"] == 8 * layer + 2 * table, "all of it on each of 8 ranks"
    assert after["kv_tokens"] < before["kv_tokens"] / 1.5, "its pages have all 8 KV heads of 8 layers"
    assert plan([str(target), "--devices", "8", "--spec-method", "mtp"]) == 2
    assert "has none: num_nextn_predict_layers" in capsys.readouterr().err


def test_pipeline_stages_are_divided_by_bytes(tmp_path, checkpoint):
    """The LM head counts: a large one leaves the last stage a single layer of four."""
    raw = read_object(checkpoint("llama") / "config.json")
    path = written(tmp_path / "model", raw | {"num_hidden_layers": 4, "vocab_size": 20_000})
    engine, config = settings(path, pipeline_parallel_size=2)
    assert lm_head_bytes(config, "float32") > 2 * sum(layer_weights(config, 0, "float32"))
    engine, memory = msgspec.structs.replace(engine, device="cpu"), SharedMemory.create(1)
    runners = [ModelRunner(engine, Group(0, 1, memory, "", 1.0, stage=Stage(number, 2))) for number in range(2)]
    assert [[layer for group in runner.kv_layout().groups for layer in group.layers] for runner in runners] == [[0, 1, 2], [3]]


@pytest.mark.req("DX-22")
def test_copies_of_experts_take_the_kv_caches_memory(tmp_path):
    engine, config = settings(written(tmp_path, MIXTURE))
    engine = msgspec.structs.replace(engine, model=msgspec.structs.replace(engine.model, dtype="bfloat16", kv_dtype="bfloat16"))
    layout = Parallelism(tensor=1, data=8, expert=True)
    without, copied = (estimate(engine, config, layout, H100, 2048, copies) for copies in (0, 8))
    assert isinstance(without, Estimate) and isinstance(copied, Estimate)
    expert = 3 * 4096 * 1536 * 2 * 48
    page = 48 * 16 * 2 * 4 * 128 * 2
    assert copied.weight_bytes - without.weight_bytes == expert, "one more of every layer on each of 8 ranks"
    assert abs((without.kv_blocks - copied.kv_blocks) * page - expert) <= page
    assert copied.max_concurrent < without.max_concurrent


@pytest.mark.req("DX-26")
def test_the_fastest_layout_that_fits_is_advised(tmp_path):
    """Which one that is depends on what an exchange costs; what does not fit is never advised, however fast."""
    engine, config = settings(written(tmp_path, LLAMA_70B))
    engine = msgspec.structs.replace(engine, model=msgspec.structs.replace(engine.model, dtype="bfloat16", kv_dtype="bfloat16"))

    def advised(device: Device, devices: int = 8) -> list[str]:
        told = [estimate(engine, config, it, device, 4096) for it in layouts(config, devices, expert=True)]
        return [str(it.parallelism) for it in best([it for it in told if isinstance(it, Estimate)])]

    assert advised(H100)[0] == "TP8" and "DP8" not in advised(H100)
    slow = msgspec.structs.replace(H100, exchange_s=1e-3)
    assert advised(slow)[0] in ("PP8", "PP4 DP2")
    roomy = msgspec.structs.replace(H100, memory_bytes=800 << 30)
    assert advised(roomy)[0] == "DP8" or advised(roomy)[0].startswith("TP")
    assert set(advised(roomy)) > set(advised(H100))
    refused = estimate(engine, config, Parallelism(tensor=3), H100, 4096)
    assert refused == Refusal(Parallelism(tensor=3), "num_attention_heads 64 cannot be divided among 3 ranks")
    assert "bytes of weights" in str(estimate(engine, config, Parallelism(data=8), H100, 4096))


def test_a_step_is_bound_by_what_must_be_read(tmp_path, capsys):
    """By hand: 141 GB over 8 devices and 3.35 TB/s, and 162 exchanges of 10 µs."""
    found = said(capsys, written(tmp_path, LLAMA_70B) / "config.json", "--devices", 8, "--context", 1024)["layouts"]
    (whole,) = [it for it in found if it["parallelism"] == {"tensor": 8, "pipeline": 1, "data": 1, "expert": False}]
    layers, head = 80 * (8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672) * 2, 128256 * 8192 * 2
    assert whole["weight_bytes"] == layers // 8 + 2 * head // 8 + 2 * 8192 * 2, "the embedding has two rows more"
    kv = 1024 * 80 * 2 * 128 * 2
    assert whole["lone_token_s"] == pytest.approx((layers / 8 + head / 8 + kv) / 3.35e12 + 162e-5, rel=1e-3)
    assert whole["tokens_per_s"] == pytest.approx(whole["batch"] / whole["token_s"])


@pytest.mark.req("Q-16")
def test_a_cache_of_eight_bits_holds_twice_the_tokens(tmp_path, capsys):
    model, held = written(tmp_path, LLAMA_70B), {}
    for kept in ("auto", "fp8", "fp8_e5m2", "int8_per_token_head"):
        found = said(capsys, model, "--devices", 8, "--kv-cache-dtype", kept)["layouts"]
        (held[kept],) = [it["kv_tokens"] for it in found if it["parallelism"]["tensor"] == 8]
    assert held["fp8"] == held["fp8_e5m2"] == pytest.approx(2 * held["auto"], rel=1e-3)
    assert held["int8_per_token_head"] == pytest.approx(2 * 128 / 132 * held["auto"], rel=1e-3), "a scale behind 128 numbers"


def test_the_command_needs_neither_weights_nor_devices_and_says_what_is_wrong(tmp_path, capsys):
    folder = written(tmp_path / "model", LLAMA_70B)
    loads = (
        "import sys; from penstock.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", loads, "plan", str(folder), "--devices", "8"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "TP8" in run.stdout and "DP8: impossible: 141,104,775,168 bytes of weights" in run.stdout
    assert plan([str(folder), "--devices", "1"]) == 1
    assert "one device: impossible" in capsys.readouterr().out
    for flags, told in (
        (["--context", "9000"], "--context 9000 is above --max-model-len 8192"),
        (["--max-model-len", "9000"], "--max-model-len 9000: the checkpoint is made for 2 to 8192 tokens"),
        (["--num-redundant-experts", "2"], "--num-redundant-experts 2: the model has no experts"),
    ):
        assert plan([str(folder), "--devices", "8", *flags]) == 2
        assert told in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert plan([str(tmp_path / "empty"), "--devices", "8"]) == 2
    assert "has no config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plan([str(folder), "--devices", "0"])
    assert "--devices" in capsys.readouterr().err
