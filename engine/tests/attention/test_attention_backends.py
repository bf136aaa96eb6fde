"""Which attention backend is chosen and why; and adapters to libraries against stand-ins with the libraries' signatures."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.attention.backends import flashinfer, registry
from penstock.engine.attention.backends.flash_attn import FlashAttentionBackend
from penstock.engine.attention.backends.interface import AttentionNeeds, StepLengths, StepMetadata
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.attention.backends.registry import BACKENDS, choose_attention, choose_backend
from penstock.engine.attention.backends.torch import TorchBackend
from penstock.engine.config import ConfigError
from penstock.engine.runner.device.graphs.descriptor import GraphSupport
from penstock.kernels.ops import REFERENCE
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.device_reference import paged_attention_device
from penstock.kernels.paged_attention.latent_launch import latent_launch
from penstock.kernels.paged_attention.launch import fast_launches, gluon_launches

STAND_INS = Path(__file__).with_name("stand_ins")
HOPPER = AttentionNeeds(
    device="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    block_sizes=(16,),
    scale=0.125,
    softcap=0.0,
    sinks=False,
    value_size=0,
    max_num_seqs=8,
    max_num_tokens=64,
    max_model_len=128,
)


@pytest.fixture
def installed(monkeypatch):
    """`installed("version_3")`: a library's stand-in can be imported."""

    def install(*names: str) -> None:
        for name in names:
            monkeypatch.syspath_prepend(STAND_INS / name)
            for module in (STAND_INS / name).glob("*.py"):
                monkeypatch.setitem(sys.modules, module.stem, None)  # noted, so that an import is forgotten at the end
                monkeypatch.delitem(sys.modules, module.stem)

    return install


@pytest.mark.req("ATT-31")
def test_a_cpu_and_a_gpu_are_served_by_the_first_that_can(caplog):
    assert choose_backend(HOPPER).name == "triton"
    for kept in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        assert choose_backend(replace(HOPPER, kv_dtype=kept)).name == "triton"
    with caplog.at_level(logging.INFO):
        assert choose_backend(replace(HOPPER, device="cpu", capability=None)).name == "torch"
    assert "attention: torch (triton: needs a CUDA device, not 'cpu'" in caplog.text


def test_gluon_serves_where_it_is_asked_for_alone(monkeypatch):
    needs = replace(HOPPER, device="meta")
    assert choose_backend(HOPPER, "gluon").name == "gluon" and "gluon" not in BACKENDS
    for name, table in (("gluon", gluon_launches), ("triton", fast_launches)):
        backend = choose_backend(HOPPER, name)(needs)
        monkeypatch.setattr(
            sys.modules["penstock.engine.attention.backends.triton"], "paged_attention", lambda *_, table, **__: table
        )
        empty = torch.empty(1, dtype=torch.int32)
        assert backend.attend(empty, empty, DeviceBatch(16, empty, empty, empty, empty, None, 1, 1), 0.1) is table


def test_a_latent_s_workspace_is_that_of_its_own_launches(monkeypatch):
    needs = replace(HOPPER, device="meta", num_heads=32, num_kv_heads=1, head_size=40, value_size=32, max_model_len=4096)
    backend = choose_backend(HOPPER)(needs)
    monkeypatch.setattr(sys.modules[type(backend).__module__], "paged_attention", lambda *_, workspace, **__: workspace)
    q, cache, tokens = torch.empty(1), torch.empty(1), torch.empty(1, dtype=torch.int32)
    room = backend.attend(q, cache, DeviceBatch(16, tokens, tokens, tokens, tokens, None, 1, 1), 0.1)
    steps = {number: latent_launch(32, number, 2, 4096, False) for number in range(1, needs.max_num_tokens + 1)}
    assert steps[1].splits == 16
    assert room.values.shape == (32 * max(launch.parts(number) for number, launch in steps.items()), 32)


@pytest.mark.req("ATT-03")
@pytest.mark.parametrize(
    ("name", "needs", "reason"),
    [
        ("triton", {"device": "cpu", "capability": None}, "--attention-backend triton: .* needs a CUDA device, not 'cpu'"),
        ("triton", {"head_size": 512}, "head size 512 is no multiple of 8 up to 256"),
        ("triton", {"block_sizes": (16, 12)}, "block size 12 is no multiple of 8"),
        ("triton", {"kv_dtype": torch.float32}, "KV cache dtype torch.float32 is none of torch.bfloat16, torch.float8_e4m3fn"),
        (
            "triton",
            {"kv_dtype": torch.float8_e4m3fn, "capability": (8, 6)},
            "8.6 is below 8.9, for a KV cache of torch.float8_e4m3",
        ),
        (
            "triton",
            {"kv_dtype": torch.int8, "value_size": 20, "head_size": 30},
            "behind 30 numbers of a byte are not at multiples of 4",
        ),
        ("gluon", {"capability": (10, 0)}, "compute capability 10.0 is not 9.x"),
        ("gluon", {"dtype": torch.float16, "kv_dtype": torch.float16}, "dtype torch.float16 is none of torch.bfloat16"),
        ("gluon", {"kv_dtype": torch.int8}, "a KV cache of torch.int8 is not in the calls that are used here"),
        ("gluon", {"head_size": 96}, "head size 96 is none of 64, 128"),
        ("gluon", {"block_sizes": (16, 24)}, "block size 24 is none of 16, 32, 64, 128"),
        ("gluon", {"num_heads": 129, "num_kv_heads": 1}, "more than 128 query heads share a key head"),
        ("gluon", {"softcap": 1.0}, "soft caps, attention sinks and latent attention are not in its kernel"),
        ("flash_attn", {"kv_dtype": torch.float8_e5m2}, "a KV cache of torch.float8_e5m2 is not in the calls that are used here"),
        ("flashinfer", {"kv_dtype": torch.int8}, "a KV cache of torch.int8 is not in the calls that are used here"),
        ("flash_attn", {}, r"neither flash_attn_interface .* nor flash_attn is installed"),
        ("flashinfer", {}, "flashinfer is not installed"),
    ],
)
def test_a_backend_that_is_asked_for_and_cannot_is_refused_with_the_reason(name, needs, reason):
    with pytest.raises(ConfigError, match=reason):
        choose_backend(replace(HOPPER, **needs), name)


@pytest.mark.req("ATT-03")
def test_only_the_backend_that_is_asked_for_is_imported(monkeypatch):
    for name in set(BACKENDS) - {"torch"}:
        monkeypatch.setitem(registry.BACKENDS, name, "no.such.module:Backend")
    assert choose_backend(HOPPER, "torch").name == "torch"


@pytest.mark.parametrize(
    ("library", "needs", "reason"),
    [
        ("version_3", {}, None),
        ("version_3", {"block_sizes": (24,)}, "block size 24 is no multiple of 16"),
        ("version_3", {"capability": (7, 5)}, "compute capability 7.5 is below 8.0"),
        ("version_3", {"capability": (8, 0)}, "neither"),
        ("version_3", {"sinks": True}, "sinks"),
        ("version_3", {"value_size": 512}, "latent attention"),
        ("version_3", {"dtype": torch.float32}, "dtype torch.float32 is none of"),
        ("version_2", {}, "block size 16 is no multiple of 256"),
        ("version_2", {"block_sizes": (256,), "capability": (8, 0)}, None),
    ],
)
def test_what_flash_attention_can(installed, library, needs, reason):
    installed(library)
    if reason is None:
        assert choose_backend(replace(HOPPER, **needs), "flash_attn") is FlashAttentionBackend
    else:
        with pytest.raises(ConfigError, match=reason):
            choose_backend(replace(HOPPER, **needs), "flash_attn")


def test_which_steps_can_be_captured(installed):
    levels = {name: choose_backend(HOPPER, name).graph_support(HOPPER) for name in ("triton", "torch")}
    assert levels == {"triton": GraphSupport.ALWAYS, "torch": GraphSupport.ALWAYS}
    assert flashinfer.FlashInferBackend.graph_support(HOPPER) == GraphSupport.NEVER
    installed("version_2")
    assert FlashAttentionBackend.graph_support(HOPPER) == GraphSupport.UNIFORM_BATCH
    installed("version_3")
    assert FlashAttentionBackend.graph_support(HOPPER) == GraphSupport.ALWAYS


ON_CPU = replace(HOPPER, device="cpu", dtype=torch.float32, softcap=20.0)


def phases(decode: str, prefill: str, max_decode_tokens: int = 1) -> AttentionPhases:
    return choose_attention(ON_CPU, decode, prefill, max_decode_tokens)


def test_prompts_may_have_a_backend_of_their_own(installed, monkeypatch, caplog):
    installed("version_3")
    monkeypatch.setattr(FlashAttentionBackend, "refusals", lambda needs: [])  # it asks for a GPU
    called = list[str]()
    for backend in (TorchBackend, FlashAttentionBackend):
        monkeypatch.setattr(backend, "attend", _noted(backend.attend, backend.name, called))
    with caplog.at_level(logging.INFO):
        attention = phases("torch", "flash_attn", max_decode_tokens=3)
    assert [record.message for record in caplog.records] == ["attention: torch", "attention of prompts: flash_attn"]
    ops = attention.bind(REFERENCE)
    for lengths, expected in (([(40, 1), (0, 1)], "torch"), ([(40, 3), (9, 1)], "torch"), ([(40, 1), (0, 4)], "flash_attn")):
        step = Step(lengths)
        attention.begin_step(step.lengths)
        out = ops.paged_attention(step.q, step.cache, step.batch, HOPPER.scale, HOPPER.softcap)
        torch.testing.assert_close(out, paged_attention_device(step.q, step.cache, step.batch, HOPPER.scale, HOPPER.softcap))
        assert called.pop() == expected and not called


def _noted(attend, name, called):
    return lambda *given, **options: called.append(name) or attend(*given, **options)


def test_a_backend_of_prompts_that_cannot_is_refused_by_its_flag():
    with pytest.raises(ConfigError, match=r"--prefill-attention-backend flash_attn: .* needs a CUDA device, not 'cpu'"):
        phases("torch", "flash_attn")


def test_one_backend_for_both_phases_chooses_nothing_in_a_step():
    attention = phases("torch", "torch")
    assert attention.decode is attention.prefill
    assert attention.bind(REFERENCE).paged_attention is REFERENCE.paged_attention


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        ("torch", "flashinfer", GraphSupport.UNIFORM_BATCH),
        ("torch", "torch", GraphSupport.ALWAYS),
        ("flashinfer", "torch", GraphSupport.NEVER),
    ],
)
def test_a_backend_of_prompts_that_cannot_be_captured_leaves_decodes_their_graphs(
    installed, monkeypatch, decode, prefill, expected
):
    installed("flashinfer")
    monkeypatch.setattr(flashinfer.FlashInferBackend, "refusals", lambda needs: [])
    assert phases(decode, prefill).graph_support == expected


@pytest.mark.req("ATT-11")
@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"block_sizes": (128,)}, "block size 128 is none of 16, 32, 64"),
        ({"capability": (7, 0)}, "compute capability 7.0 is below 7.5"),
        ({"capability": (13, 0)}, "compute capability 13.0 is above 12.1"),
        ({"head_size": 80}, "head size 80 is none of 64, 128, 256"),
    ],
)
def test_what_flashinfer_can(installed, needs, reason):
    installed("flashinfer")
    assert choose_backend(HOPPER, "flashinfer").name == "flashinfer"
    with pytest.raises(ConfigError, match=reason):
        choose_backend(replace(HOPPER, **needs), "flashinfer")


class Step:
    """Requests of (computed, new) tokens over a cache of 40 blocks, whose rows lie anywhere in the table."""

    def __init__(self, lengths: list[tuple[int, int]], window: int | None = None, pad_tokens: int = 0) -> None:
        rng = np.random.default_rng(0)
        starts = np.concatenate(([0], np.cumsum([new for _, new in lengths]))).astype(np.int32)
        seq_lens, rows = np.array([sum(pair) for pair in lengths], np.int32), rng.permutation(8)[: len(lengths)].astype(np.int32)
        table = rng.integers(0, 40, (8, 8)).astype(np.int32)
        tokens = int(starts[-1]) + pad_tokens
        self.batch = DeviceBatch.from_host(starts, seq_lens, table, 16, window, rows=rows, num_tokens=tokens)
        self.lengths = StepLengths(rows, starts, seq_lens)
        torch.manual_seed(0)
        self.q, self.cache = torch.randn(tokens, 8, 64), torch.randn(40, 2, 2, 16, 64)

    def check(self, backend) -> None:
        """In two layers, then with other lengths in the same tensors, then in another batch: nothing of before may be left."""
        layers = self.cache, self.cache.flip(0)
        shorter = self.lengths.seq_lens - (self.lengths.seq_lens > np.diff(self.lengths.query_start_loc))
        for batch, seq_lens in ((self.batch, self.lengths.seq_lens), (self.batch, shorter), (replace(self.batch), shorter)):
            batch.seq_lens.copy_(torch.from_numpy(seq_lens))
            backend.begin_step(replace(self.lengths, seq_lens=seq_lens))
            for cache in layers:
                out = backend.attend(self.q, cache, batch, HOPPER.scale, backend.needs.softcap)
                expected = paged_attention_device(self.q, cache, batch, HOPPER.scale, backend.needs.softcap)
                torch.testing.assert_close(out, expected)
        self.batch.seq_lens.copy_(torch.from_numpy(self.lengths.seq_lens))


STEPS = {
    "decode": Step([(40, 1), (0, 1), (99, 1)]),
    "padded": Step([(40, 1), (17, 1)], pad_tokens=2),
    "mixed": Step([(20, 7), (33, 1), (0, 30), (16, 16)], pad_tokens=3),
    "window": Step([(20, 7), (100, 1), (90, 5)], window=18),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("library", ["version_2", "version_3"])
def test_flash_attention_is_given_what_a_step_is(installed, step, library):
    installed(library)
    step.check(FlashAttentionBackend(replace(ON_CPU, capability=(9, 0))))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_flashinfer_is_given_decodes_and_prompts_apart(installed, step):
    installed("flashinfer")
    step.check(flashinfer.FlashInferBackend(ON_CPU))


@pytest.mark.req("ATT-11", "ATT-12")
def test_a_mixed_batch_is_split_with_its_decodes_first(installed):
    installed("flashinfer")
    step = STEPS["mixed"]
    backend = flashinfer.FlashInferBackend(ON_CPU)
    backend.begin_step(step.lengths)
    found = backend._build(step.batch)
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills, found.num_prefill_tokens) == (1, 1, 3, 53)
    assert found.order.tolist() == [7, *range(7), *range(8, 54)]


def test_the_layers_of_a_group_share_what_is_derived_from_a_step():
    built, step = [], STEPS["mixed"]
    metadata = StepMetadata(lambda batch: built.append(batch))
    layers = [torch.empty(1) for _ in range(3)]
    for _ in range(2):
        for cache in layers:
            metadata.of(step.batch, cache)
    assert len(built) == 2


def test_two_kv_groups_of_a_step_keep_their_metadata_apart(installed):
    installed("version_3")
    full, windowed = Step([(20, 7), (33, 1)]), Step([(20, 7), (33, 1)], window=9)
    backend = FlashAttentionBackend(replace(ON_CPU, capability=(9, 0)))
    for step in (full, windowed, full, windowed):
        step.check(backend)
