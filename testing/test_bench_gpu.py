"""The arithmetic of `make bench-gpu`, and each of its figures from end to end on this machine with a tiny model."""

import sys
import time
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_gpu  # noqa: E402
from gpu import (  # noqa: E402
    decode_attention,
    dependent_launch,
    gluon_prefill,
    host_time,
    itl,
    latent_attention,
    mixed_graphs,
    nano,
    prefill_attention,
    roofline,
    start,
)
from gpu.attention_peers import latent_peers  # noqa: E402
from gpu.clock import HostClock  # noqa: E402
from gpu.figures import (  # noqa: E402
    FIGURES,
    Gate,
    attention_bytes,
    bound_of_step,
    causal_flops,
    ceilings_told,
    mixed_lengths,
    nano_floor_s,
    nano_requests,
    percentile,
)
from gpu.profiler import Profile, union_s  # noqa: E402
from gpu.read_stream import read_stream  # noqa: E402

from penstock.engine.core.executor import InlineExecutor  # noqa: E402
from penstock.engine.loading.checkpoint import read_model_config  # noqa: E402
from penstock.engine.roofline import Ceilings  # noqa: E402
from penstock.kernels.paged_attention.device_reference import paged_attention_device  # noqa: E402

MODELS, MODEL = ROOT / "examples/models", "penstock-tiny"
MEASURED = Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12)
SLOW = Ceilings(bytes_per_s=1e8, flops_per_s=1e9)


def test_a_gate_says_by_how_much_it_was_missed():
    less, more = Gate(4.0, 3.0, "ms", "less"), Gate(100, 120, "tok/s", "more")
    assert less.judge(3.9)["met"] and less.judge(4.0)["told"] == "met"
    assert (less.judge(5.0)["met"], less.judge(5.0)["told"]) == (False, "missed by 25 %")
    assert more.judge(100)["met"] and more.judge(80)["told"] == "missed by 25 %"


def test_the_256_requests_are_those_that_others_publish():
    requests = nano_requests()
    assert len(requests) == 256
    assert (sum(prompt for prompt, _ in requests), sum(output for _, output in requests)) == (142_827, 133_966)


@pytest.mark.req("PERF-02", "PERF-08")
def test_three_loads_meet_three_ceilings():
    """A lone decode the bandwidth, a prompt of 8k the processor, and many long contexts the capacity."""
    model = read_model_config(ROOT / "benchmarks/shapes/llama-3.1-8b", served_names=(), load_format="dummy").cost
    assert model is not None
    assert ceilings_told(model, MEASURED, 100 * 10**9) == [
        "balance point: 184 operations a byte as measured, 206 by an H200's datasheet",
        "one decode at 1k: bandwidth",
        "a prompt of 8k: compute",
        "256 decodes at 8k: capacity (93 fit)",
    ]


@pytest.mark.parametrize(("shape", "floor"), [("qwen3-0.6b", 36_400), ("qwen3-14b", 8_300), ("llama-3.1-8b", 13_700)])
def test_their_floor_is_the_one_that_was_reckoned_elsewhere(shape, floor):
    model = read_model_config(ROOT / "benchmarks/shapes" / shape, served_names=(), load_format="dummy").cost
    assert model is not None
    assert 133_966 / nano_floor_s(model, nano_requests(), MEASURED) == pytest.approx(floor, rel=0.02)


def test_what_bounds_a_step_is_the_largest_part_of_it():
    assert bound_of_step(1.0, 0.8, 0.9).startswith("the roofline (floor 800.000 ms, kernels beyond it 100.000, device idle 100")
    assert bound_of_step(1.0, 0.2, 0.9).startswith("kernels below the roofline")
    assert bound_of_step(1.0, 0.2, 0.3).startswith("launches and the host")


def test_small_sums():
    assert union_s([(0, 1), (0.5, 2), (3, 4), (3.5, 3.6)]) == 3
    assert percentile([5, 1, 3, 2, 4], 0.99) == 5 and percentile([1, 2, 3, 4], 0.5) == 3
    assert attention_bytes([4096] * 64, 8, 128, 2) == 2**30, "the gated case reads a gigabyte"
    assert causal_flops(8192, 32, 128) == 4 * 32 * 128 * 8192 * 8192 // 2
    lengths = mixed_lengths(64, 64 * 4096)
    assert sum(lengths) == 64 * 4096 and max(lengths) > 20 * min(lengths)


@pytest.mark.parametrize("size", [1, 100, 64 * 8 * 2 + 7])
def test_the_read_stream_reads_every_element(size):
    numbers = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32)
    expected = 0
    for number in numbers.tolist():
        expected ^= number
    found = 0
    for part in read_stream(numbers, block=64).tolist():
        found ^= part
    assert found == expected


class FixedClock(HostClock):
    """Runs the work once and says what it is told to."""

    def __init__(self, *seconds):
        self._seconds = iter(seconds)

    def seconds(self, work, *, repeats=20, flush=True):
        work()
        return next(self._seconds)


def test_decode_attention_is_held_to_the_stream_and_beside_peers():
    seen = {}

    def attend(q, cache, batch, scale):
        seen[batch.num_requests] = paged_attention_device(q, cache, batch, scale)
        return seen[batch.num_requests]

    def peers(q, cache, table, lengths, scale):
        def absent():
            raise ImportError("No module named 'elsewhere'")

        return {"half": lambda: lambda: None, "absent": absent, "dense": lambda: theirs(q, cache, table, lengths, scale)}

    def theirs(q, cache, table, lengths, scale):
        work = decode_attention.decode_peers(q, cache, table, lengths, scale)["torch SDPA, flash"]
        return work()

    cases = [decode_attention.Case("two", [48, 20], True), decode_attention.Case("one", [33], False)]
    clock = FixedClock(1e-3, 2e-6, 4e-6, 1e-6, 2e-6, 1e-6, 1.0, 1.0, 1.0, 3e-6, 2e-6)
    found = decode_attention.measure(
        "cpu", cases=cases, prefixes=[(3, 128)], attend=attend, clock=clock, stream_bytes=1024, peers=peers, dtype=torch.float32
    )
    row = found["rows"][0]
    assert row["bytes"] == 2 * 68 * 8 * 128 * 4 and found["stream_bytes_per_s"] == pytest.approx(1024 / 1e-3)
    assert found["value"] == pytest.approx(100 * row["bytes"] / 2e-6 / found["stream_bytes_per_s"]), "of the gated case alone"
    assert row["peers"]["half"]["penstock_over_it"] == pytest.approx(2.0)
    assert [it["times_as_fast"] for it in row["eight_bits"].values()] == pytest.approx([2.0, 1.0, 2.0])
    assert "eight_bits" not in found["rows"][1]
    expected = {"requests": 3, "shared": 128, "us": 2.0, "us_each": 3.0, "times_as_fast": 1.5, "chosen": False}
    assert found["shared_prefixes"] == [pytest.approx(expected)]
    assert row["peers"]["absent"] == {"absent": "ImportError: No module named 'elsewhere'"}
    assert "lengths that are equal" in row["peers"]["dense"]["absent"]
    assert found["rows"][1]["peers"]["half"]["us"] == 1e6 and seen[2].isfinite().all() and seen[2].abs().max() > 0


def test_peers_over_dense_keys_compute_what_ours_does():
    """Else they would be no peers: the same pages, taken apart."""
    q, cache, batch = decode_attention.batch_of([37, 37], torch.device("cpu"), torch.float32)
    expected = paged_attention_device(q, cache, batch, 0.1)
    peers = decode_attention.decode_peers(q, cache, batch.block_table, batch.seq_lens, 0.1)
    torch.testing.assert_close(peers["torch SDPA, flash"]()().squeeze(2), expected, atol=1e-5, rtol=1e-4)


def test_the_kernel_that_is_timed_is_the_engines():
    q, cache, batch = decode_attention.batch_of([20, 5], torch.device("cpu"), torch.float32)
    expected = paged_attention_device(q, cache, batch, 0.1)
    torch.testing.assert_close(decode_attention.triton_attend()(q, cache, batch, 0.1), expected, atol=1e-4, rtol=1e-3)


def test_latents_are_held_to_what_reading_them_takes():
    ran = []

    def attend(q, cache, batch):
        ran.append((q.shape, cache.shape, batch.seq_lens.tolist()))
        return q

    cases = (latent_attention.Case(2, 3, 70, True), latent_attention.Case(4, 1, 64, False))

    class Timed(FixedClock):
        def seconds(self, work, *, repeats=20, flush=True):
            work()
            return next(times)

    times = iter([2.0, 1.0, 4.0, 1.0, 1.0])
    peers = lambda q, *_: {"one": lambda: lambda: q}  # noqa: E731
    found = latent_attention.measure(
        cases=cases, attend=attend, clock=Timed(), stream_bytes=1 << 20, peers=peers, dtype=torch.float32
    )
    assert ran == [((3, 2, 576), (7, 1, 1, 64, 576), [70] * 3), ((1, 4, 576), (2, 1, 1, 64, 576), [64])]
    assert found["value"] == pytest.approx(100 * 3 * 70 * 576 * 4 / (2**20 / 2.0))
    assert found["rows"][0]["peers"]["one"] == {"us": pytest.approx(4e6), "penstock_over_it": pytest.approx(4.0)}


def test_flash_mla_gets_keys_that_begin_with_their_values(monkeypatch):
    got = {}

    def attend(q, keys, *rest, **options):
        got.update(q=q, keys=keys, rest=rest, options=options)

    library = SimpleNamespace(get_mla_metadata=lambda *_: ("plan", "splits"), flash_mla_with_kvcache=attend)
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    q, cache = torch.arange(10.0).repeat(3, 2, 1), torch.arange(10.0).repeat(5, 1, 1, 4, 1)
    table, lengths = torch.zeros(3, 2, dtype=torch.int32), torch.full((3,), 7, dtype=torch.int32)
    latent_peers(q, cache, table, lengths, 0.5, 8)["FlashMLA"]()()
    assert got["q"].shape == (3, 1, 2, 10) and got["keys"].shape == (5, 4, 1, 10)
    assert got["q"][0, 0, 0].tolist() == got["keys"][0, 0, 0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert got["rest"][2:] == (8, "plan", "splits") and got["options"] == {"softmax_scale": 0.5, "causal": True}


def test_gluons_prefill_is_told_beside_tritons():
    times = iter([3.0, 1.0, 6.0, 3.0])

    class Timed(HostClock):
        def seconds(self, work, *, repeats=20, flush=True):
            work()
            return next(times)

    nothing = lambda q, *_: q  # noqa: E731
    found = gluon_prefill.measure(lengths=(16, 32), gated=32, ours=nothing, triton=nothing, clock=Timed(), dtype=torch.float32)
    assert [row["times_as_fast"] for row in found["rows"]] == [pytest.approx(3.0), pytest.approx(2.0)]
    assert found["value"] == pytest.approx(2.0)


def test_prefill_attention_counts_half_of_the_square():
    found = prefill_attention.measure(
        "cpu",
        lengths=(24, 40),
        gated=40,
        attend=paged_attention_device,
        clock=FixedClock(1.0, 1.0, 2e-6, 1e-6),
        peers=lambda q, k, v, scale: {"one": lambda: lambda: None},
        dtype=torch.float32,
    )
    assert found["value"] == pytest.approx(causal_flops(40, 32, 128) / 2e-6 / 1e12)
    assert found["rows"][1]["peers"]["one"]["penstock_over_it"] == pytest.approx(0.5)
    assert found["bound_by"].startswith("operations; the fastest peer here reaches")


def fake_profile(work):
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return Profile(busy_s=0.5 * seconds, span_s=seconds, kernels=40)


def test_time_between_tokens_with_its_floor_and_what_bounds_it():
    found = itl.measure(MODEL, "cpu", folder=MODELS, batches=(1, 3), context=40, steps=6, ceilings=SLOW, profiler=fake_profile)
    one, three = found["rows"]
    assert found["value"] == one["itl_ms"] > 0 and one["kernels"] == 2
    # All weights at 100 MB/s, and a little for the keys of 40 to 60 tokens.
    weights = 2 * (4 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 576) + 4096 * 256)
    assert 1e3 * weights / 1e8 < one["floor_ms"] < 1.05e3 * weights / 1e8
    assert one["floor_ms"] < three["floor_ms"] < 1.1 * one["floor_ms"]
    assert one["share_of_roofline"] == pytest.approx(one["floor_ms"] / one["itl_ms"])


def test_every_token_of_the_256_requests_is_counted():
    requests = [(30, 5), (12, 9), (50, 3)]
    found = nano.measure(MODEL, "cpu", folder=MODELS, requests=requests, max_model_len=128, budget=64, ceilings=SLOW)
    assert (found["output_tokens"], found["prompt_tokens"], found["preemptions"]) == (17, 92, 0)
    assert found["value"] == pytest.approx(17 / found["seconds"]) and found["steps"] >= 9
    assert found["share_of_floor"] > 0 and found["share_of_steps_roofline"] > 0


def test_the_hosts_time_is_the_step_less_what_it_waits():
    """Here all of the model's work counts as waiting, since it is done while the result is collected."""
    collected = (InlineExecutor, "submit")
    found = host_time.measure(MODEL, "cpu", folder=MODELS, running=4, context=20, steps=8, ceilings=SLOW, waited=collected)
    assert 0 < found["value"] < found["step_ms"] and found["running"] == 4
    assert "of which the host waits" in found["bound_by"]
    assert InlineExecutor.submit.__qualname__ == "InlineExecutor.submit", "what was wrapped is unwrapped"


def test_dependent_launches_are_measured_beside_launches_one_after_another():
    def measure_itl(shape, batches, steps):
        seconds = 2.0 if dependent_launch.dependent_launch.overlaps(torch.device("meta")) else 3.0
        return {"rows": [{"batch": batch, "itl_ms": seconds * batch, "bound_by": "launches"} for batch in batches]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dependent_launch.dependent_launch, "overlaps", lambda _device: True)
        found = dependent_launch.measure("qwen3-0.6b", measure_itl)
    assert found["value"] == 1.5 and [row["itl_without_ms"] for row in found["rows"]] == [3.0, 24.0]


def test_mixed_steps_are_measured_in_both_modes():
    """Without graphs here."""
    sizes = {"decoding": 2, "context": 20, "sizes": (6, 8, 12), "steps": 4}
    found = mixed_graphs.measure(MODEL, "cpu", folder=MODELS, graphs=False, ceilings=SLOW, **sizes)
    assert [row["tokens"] for row in found["rows"]] == [6, 8, 12] and found["rows"][0]["whole"]["launched"] == {}
    row = found["rows"][1]
    assert found["value"] == row["times_as_fast"] == row["pieces"]["step_ms"] / row["whole"]["step_ms"] > 0


def test_the_engines_share_is_compared_with_the_profilers():
    def twice(work):
        found = fake_profile(work)
        return found._replace(span_s=2 * found.span_s)

    found = roofline.measure(MODEL, "cpu", folder=MODELS, batches=(2,), context=20, steps=12, ceilings=SLOW, profiler=twice)
    [row] = found["rows"]
    assert found["says"][0].startswith("balance point: 10 operations a byte as measured") and len(found["says"]) == 4
    # The engine's own clock sees at most what passed, and the profile was said to have lasted twice that.
    assert row["own_share"] > 1.9 * row["profilers_share"] and found["value"] == row["off_percent"] > 90


@pytest.mark.slow
def test_a_start_is_measured_from_outside(tmp_path):
    found = start.started(MODELS / MODEL, "cpu", tmp_path)
    assert found["process_s"] > found["load_s"] + found["first_token_s"] > 0


def test_figures_share_the_time_and_fail_alone(capsys):
    now = chain([0.0, 0.0, 0.0, 100.0, 100.0, 395.0, 395.0], repeat(395.0))

    def run(name, limit_s):
        return {"itl_8b": {"value": 5.06, "bound_by": "x", "says": ["more"]}, "nano_0.6b": {"failed": "RuntimeError: no"}}[name]

    found = bench_gpu.run_figures(["itl_8b", "nano_0.6b", "start"], 400.0, run, lambda: next(now), lambda text: None)
    assert found["itl_8b"]["told"] == "missed by 10 %" and found["nano_0.6b"] == {"failed": "RuntimeError: no"}
    assert found["start"]["failed"] == "not begun: 5 s are left (--only start)"
    assert sum(figure.limit_s for figure in FIGURES.values()) <= 1125, "what takes too long leaves time for others"
    bench_gpu.show(found, bench_gpu.Console(width=200))
    assert "missed by 10 %" in (told := capsys.readouterr().out) and "itl_8b: bound by x\nitl_8b: more\n" in told


def test_a_figure_that_hangs_or_breaks_says_why(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert bench_gpu.run_figure("itl_8b", 5.0) == {"failed": "exit status 1", "log": ""}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py"])
    assert bench_gpu.main() == 2 and "no CUDA device" in capsys.readouterr().out
