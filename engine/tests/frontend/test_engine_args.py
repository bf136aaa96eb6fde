"""Flags and keyword arguments are the same settings."""

import logging
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.api.resources.support import WEIGHTS
from penstock.engine.args import EngineArgs
from penstock.engine.cli import API_KEY_VARIABLE, _api_settings, _parser
from penstock.engine.config import ConfigError, GraphConfig
from penstock.engine.frontend.python.prompts import load_processor
from penstock.engine.quant.online import SCHEMES
from penstock.engine.quant.scheme import QuantizationName
from penstock.kernels.cpu import isa

TINY = Path(__file__).parents[3] / "examples/models/penstock-tiny"
SHAPES = Path(__file__).parents[3] / "benchmarks/shapes"


def test_every_engine_flag_is_a_keyword_with_the_same_default() -> None:
    parsed = vars(_parser().parse_args(["m"]))
    names = set(EngineArgs.__struct_fields__)
    assert names <= set(parsed)
    assert EngineArgs(**{name: parsed[name] for name in names}) == EngineArgs(model="m")
    [group] = [group for group in _parser()._action_groups if group.title == "engine"]
    assert {action.dest for action in group._group_actions} <= names


@pytest.mark.req("AS-02")
@pytest.mark.parametrize(("device", "unsaid"), [("cpu", 1), ("cuda", 2)])
@pytest.mark.parametrize(("flags", "depth"), [([], None), (["--async-scheduling"], 2), (["--no-async-scheduling"], 1)])
def test_async_scheduling_is_a_depth(device, unsaid, flags, depth, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("penstock.engine.args_config.choose_device", lambda asked: device)
    parsed = vars(_parser().parse_args([str(TINY), *flags]))
    config = EngineArgs(**{name: parsed[name] for name in EngineArgs.__struct_fields__}).config()
    assert (config.device, config.depth) == (device, depth or unsaid)
    off = device == "cpu" and not flags
    assert ("async scheduling: off" in caplog.text) is off, "where nobody has said, the log says what was chosen"


@pytest.mark.parametrize("given", ["avx512_bf16", "avx2", "neon", "portable"])
def test_an_instruction_set_is_taken_where_the_cpu_has_it(given, monkeypatch) -> None:
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    args = EngineArgs(model=str(TINY), device="cpu", cpu_isa=given)
    if given in ("avx2", "portable"):
        assert args.config().cpu_isa == given
    else:
        with pytest.raises(ConfigError, match=rf"--cpu-isa: this CPU does not have {given} \(it has avx2, portable\)"):
            args.config()


def test_an_instruction_set_is_for_a_cpu(monkeypatch) -> None:
    monkeypatch.setattr("penstock.engine.args_config.choose_device", lambda asked: "cuda")
    with pytest.raises(ConfigError, match="--cpu-isa portable needs --device cpu"):
        EngineArgs(model=str(TINY), cpu_isa="portable").config()
    assert EngineArgs(model=str(TINY)).config().cpu_isa is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": Path("m")}, "model: must be a string, not PosixPath"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be at least 1"),
        ({"max_num_seqs": 10**11}, "max_num_seqs: must be at most 65536"),
        ({"max_model_len": 64.5}, "max_model_len: must be a whole number, not a fraction"),
        ({"max_model_len": "64"}, "max_model_len: must be a whole number, not a string"),
        ({"block_size": True}, "block_size: must be a whole number, not true or false"),
        ({"num_gpu_blocks_override": -1}, "num_gpu_blocks_override: must be at least 1"),
        ({"watermark": 1.0}, "watermark: must be below 1"),
        ({"tenant_weights": {"a": 0}}, "tenant_weights: a value must be above 0"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization: must be at most 1"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy: must be fcfs or priority, not 'lifo'"),
        ({"logits_processors": "module:Class"}, "logits_processors: must be a list, not a string"),
    ],
)
def test_a_keyword_that_makes_no_sense_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        EngineArgs(**{"model": "m", **wrong}).config()


def test_tenants_weights_are_positive_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert _parser().parse_args(["m", "--tenant-weights", "a=2,b=0.5"]).tenant_weights == {"a": 2.0, "b": 0.5}
    for wrong in ("a", "a=0", "=1", "a=much"):
        with pytest.raises(SystemExit):
            _parser().parse_args(["m", "--tenant-weights", wrong])
        assert f"'{wrong}' is not NAME=WEIGHT" in capsys.readouterr().err


def test_keys_come_from_flags_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(*flags: str) -> tuple[str, ...]:
        return _api_settings(_parser().parse_args(["m", *flags])).api_keys

    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert keys() == ()
    assert keys("--api-key", "a", "b") == ("a", "b")
    monkeypatch.setenv(API_KEY_VARIABLE, "c")
    assert keys() == ("c",) and keys("--api-key", "a") == ("a",)
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):  # open by mistake it is not
        keys()


def test_parsers_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser nonsense: there are hermes"):
        _api_settings(_parser().parse_args(["m", "--tool-call-parser", "nonsense"]))


TINY = str(Path(__file__).parents[3] / "examples/models/penstock-tiny")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cudagraph_mode": "FULL"}, "--cudagraph-mode and --device cpu has no graphs"),
        ({"cudagraph_capture_sizes": [1, 2]}, "--cudagraph-capture-sizes and --device cpu has no graphs"),
        ({"max_cudagraph_capture_size": 8}, "--max-cudagraph-capture-size and --device cpu has no graphs"),
        ({"cudagraph_capture_sizes": [0]}, "cudagraph_capture_sizes[0]: must be at least 1"),
        ({"cudagraph_mode": "PIECES"}, "cudagraph_mode: must be FULL, FULL_AND_PIECEWISE, NONE or PIECEWISE, not 'PIECES'"),
    ],
)
def test_graphs_that_cannot_be_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        EngineArgs(**{"model": TINY, "device": "cpu", **wrong}).config()
    assert EngineArgs(model=TINY, device="cpu", enforce_eager=True, cudagraph_mode="NONE").config().graphs == GraphConfig()


def test_origins_are_a_list_of_what_browsers_send() -> None:
    def allowed(text: str) -> tuple[str, ...]:
        return _api_settings(_parser().parse_args(["m", "--allowed-origins", text])).allowed_origins

    assert allowed('["*"]') == ("*",) and allowed("[]") == ()
    assert allowed('["http://localhost:3000", "app://ui"]') == ("http://localhost:3000", "app://ui")
    for wrong in ("*", '"*"', '["https://ui.example/"]', '["ui.example"]', '["https://UI.example"]', "[1]"):
        with pytest.raises(SystemExit):
            allowed(wrong)


def test_the_tokenizer_may_come_from_another_folder(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": str(SHAPES / "qwen3-0.6b"), "load_format": "dummy", "device": "cpu"}
    with pytest.raises(ConfigError, match=r"qwen3-0\.6b/tokenizer\.json"):
        load_processor(EngineArgs(**asked).config())
    found = load_processor(EngineArgs(**asked, tokenizer=str(SHAPES)).config())
    assert found.bundle.tokenizer == (SHAPES / "tokenizer.json").read_text()
    with pytest.raises(ConfigError, match=re.escape(f"cannot read {tmp_path}/tokenizer.json")):
        load_processor(EngineArgs(**asked, tokenizer=str(tmp_path)).config())


@pytest.mark.req("Q-03")
def test_schemes_of_weights_are_exactly_these() -> None:
    """At the command line, in Python, in an InferenceModel, and where weights are quantized; any other name is an error."""
    names = set(get_args(QuantizationName))
    assert names == set(WEIGHTS) == set(SCHEMES)
    for name in names:
        assert EngineArgs(model=TINY, device="cpu", quantization=name).config().model.quantization == name
    others = {
        "fp8_per_tensor_static",
        "fp8_per_token",
        "fp8_per_block_static",
        "mxfp8",
        "mxfp4",
        "int8_per_channel_static",
        "fp4",
    }
    for name in others - names:
        with pytest.raises(ConfigError, match=rf"quantization: must be .*fp8_per_block.*, not '{name}'|--quantization {name}: "):
            EngineArgs(model=TINY, device="cpu", quantization=name).config()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"kv_cache_dtype": "float16", "dtype": "bfloat16"},
            "--kv-cache-dtype float16: no kernel reads it beside --dtype bfloat16",
        ),
        (
            {"kv_cache_dtype": "int8"},
            "must be auto, bfloat16, float16, float32, fp8, fp8_e4m3, fp8_e5m2 or int8_per_token_head, not 'int8'",
        ),
    ],
)
def test_a_kv_cache_that_no_kernel_reads_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        EngineArgs(**{"model": TINY, "device": "cpu", **given}).config()
    with pytest.raises(
        ConfigError, match="--kv-cache-dtype float32: on a GPU the cache has the model's dtype, bfloat16, or eight"
    ):
        EngineArgs(model=TINY, dtype="bfloat16", kv_cache_dtype="float32").config(device="cuda")


def test_keys_and_values_have_the_models_dtype_or_one_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    def sizes(**flags: Any) -> tuple[str | None, int]:
        model = EngineArgs(model=TINY, device="cpu", dtype="float32", **flags).config().model
        assert model.cost is not None
        return model.kv_dtype, model.cost.windows[0].kv_bytes_per_token

    (same, plain), (other, half) = sizes(), sizes(kv_cache_dtype="bfloat16")
    assert (same, other) == ("float32", "bfloat16") and half * 2 == plain
    with pytest.raises(SystemExit):
        _parser().parse_args(["m", "--kv-cache-dtype", "int8"])
    assert "--kv-cache-dtype: invalid choice: 'int8'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (3, "num_attention_heads 4 cannot be divided among 3 ranks; possible sizes: 1, 2, 4"),
        (8, "num_attention_heads 4 cannot be divided among 8 ranks; possible sizes: 1, 2, 4"),
        (4, None),
    ],
)
def test_ranks_among_which_the_model_cannot_be_divided_are_refused(ranks, problem) -> None:
    args = EngineArgs(model=str(TINY), device="cpu", tensor_parallel_size=ranks)
    if problem is None:
        assert args.config().parallel.world == ranks
    else:
        with pytest.raises(ConfigError, match=f"^--tensor-parallel-size {ranks}: {problem}$"):
            args.config()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"pipeline_parallel_size": 999}, r"--pipeline-parallel-size 999: num_hidden_layers \d+ cannot be divided"),
        ({"async_scheduling": False}, "--no-async-scheduling: --pipeline-parallel-size 2 keeps a plan in flight for each stage"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(fields, problem) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        EngineArgs(**{"model": str(TINY), "device": "cpu", "pipeline_parallel_size": 2} | fields).config()


def test_a_pipeline_keeps_a_plan_in_flight_for_each_stage() -> None:
    config = EngineArgs(model=str(TINY), device="cpu", pipeline_parallel_size=2, tensor_parallel_size=2).config()
    assert config.parallel.world == 4 and config.depth == config.scheduler.pipeline_stages == 2


def test_several_ranks_on_a_gpu_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("penstock.engine.args_config.choose_device", lambda asked: "cuda")
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2: several ranks run on a CPU alone so far \(--device cpu\)"):
        EngineArgs(model=str(TINY), tensor_parallel_size=2).config()


def test_drafts_come_after_the_result_where_a_plan_can_wait_for_it() -> None:
    for method in ("ngram", "suffix"):
        scheduler = EngineArgs(model=TINY, spec_method=method, spec_tokens=3).config(device="cuda").scheduler
        assert (scheduler.num_speculative_tokens, scheduler.drafts_after_result) == (3, True)
        on_cpu = {ahead: EngineArgs(model=TINY, spec_method=method, async_scheduling=ahead) for ahead in (False, True)}
        assert [args.config(device="cpu").scheduler.drafts_after_result for args in on_cpu.values()] == [True, False]
    beside = {"model": TINY, "spec_method": "draft_model", "spec_model": TINY}
    config = EngineArgs(**beside).config(device="cuda")
    assert (config.depth, config.scheduler.num_lookahead_tokens, EngineArgs(model=TINY).config(device="cuda").depth) == (1, 4, 2)
    with pytest.raises(ConfigError, match="--async-scheduling: a draft model or a head on a device reads what a step has left"):
        EngineArgs(**beside, async_scheduling=True).config(device="cuda")


def test_pages_in_the_hosts_memory_need_a_prefix_cache_on_a_cpu() -> None:
    cache = EngineArgs(model=TINY, device="cpu", kv_offload_memory_bytes=1 << 20).config().cache
    assert cache.offload_bytes == 1 << 20 and cache.loads_by_cost and cache.eviction_policy == "lru"
    assert EngineArgs(model=TINY, device="cpu", kv_offload_eviction_policy="arc").config().cache.eviction_policy == "arc"
    assert not EngineArgs(model=TINY, device="cpu", kv_offload_loads="always").config().cache.loads_by_cost
    with pytest.raises(ConfigError, match=r"--kv-offload-memory-bytes .* needs --enable-prefix-caching"):
        EngineArgs(model=TINY, device="cpu", kv_offload_memory_bytes=1 << 20, enable_prefix_caching=False).config()
    with pytest.raises(ConfigError, match="--kv-offload-memory-bytes: pages are kept on a CPU alone so far"):
        EngineArgs(model=TINY, kv_offload_memory_bytes=1 << 20).config(device="cuda")


def test_pages_in_an_object_store_need_an_address_a_size_and_a_tier_in_front() -> None:
    memory = {"model": TINY, "device": "cpu", "kv_offload_memory_bytes": 1 << 20}
    cache = EngineArgs(**memory, kv_offload_bucket="s3://b/kv", kv_offload_bucket_bytes=5).config().cache
    assert (cache.bucket, cache.bucket_bytes) == ("s3://b/kv", 5)
    for given, words in (
        ({**memory, "kv_offload_bucket_bytes": 5}, "--kv-offload-bucket-bytes needs --kv-offload-bucket"),
        ({**memory, "kv_offload_store": "mooncake://h:5"}, "--kv-offload-store needs --kv-offload-store-bytes"),
        ({**memory, "kv_offload_store": "h:5", "kv_offload_store_bytes": 5}, "expected mooncake://HOST:PORT"),
        ({**memory, "kv_offload_bucket": "s3://b/kv"}, "--kv-offload-bucket needs --kv-offload-bucket-bytes"),
        ({**memory, "kv_offload_bucket": "b/kv", "kv_offload_bucket_bytes": 5}, "expected s3://BUCKET/PATH"),
        ({"model": TINY, "kv_offload_bucket": "s3://b/kv", "kv_offload_bucket_bytes": 5}, "needs --kv-offload-memory-bytes"),
        ({"model": TINY, "kv_offload_threshold": 2}, "--kv-offload-threshold .* needs --kv-offload-memory-bytes"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineArgs(**{"device": "cpu", **given}).config()


def test_pages_on_the_disk_need_a_folder_a_size_and_a_tier_in_front(tmp_path) -> None:
    folder, memory = str(tmp_path), {"model": TINY, "device": "cpu", "kv_offload_memory_bytes": 1 << 20}
    cache = EngineArgs(**memory, kv_offload_directory=folder, kv_offload_disk_bytes=5).config().cache
    assert (cache.disk_folder, cache.disk_bytes) == (tmp_path, 5)
    with pytest.raises(ConfigError, match="--kv-offload-disk-bytes needs --kv-offload-directory"):
        EngineArgs(**memory, kv_offload_disk_bytes=5).config()
    with pytest.raises(ConfigError, match="--kv-offload-directory needs --kv-offload-disk-bytes"):
        EngineArgs(**memory, kv_offload_directory=folder).config()
    with pytest.raises(ConfigError, match=r"--kv-offload-directory .* needs --kv-offload-memory-bytes"):
        EngineArgs(model=TINY, device="cpu", kv_offload_directory=folder, kv_offload_disk_bytes=5).config()
