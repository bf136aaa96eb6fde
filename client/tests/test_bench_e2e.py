"""`penstock bench` as a process against a real engine."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.api import metrics


def bench(url: str, folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The saved numbers, and what was printed."""
    save = ["--save-detailed", "--result-dir", str(folder), "--result-filename", "r.json"]
    command = [sys.executable, "-m", "penstock.cli", "bench", "serve", "--base-url", url, *save, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "160"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "r.json").read_text()), done.stdout


@pytest.mark.req("MET-09")
def test_a_real_engine_is_measured_token_by_token(engine: str, tmp_path: Path) -> None:
    shape = ["--random-input-len", "40", "--random-output-len", "12", "--random-range-ratio", "0.5", "--ignore-eos"]
    found, shown = bench(engine, tmp_path, "--num-prompts", "20", "--request-rate", "100", *shape)
    assert (found["completed"], found["model"], found["answers_without_usage"]) == (20, "tiny", 0)
    lengths = [one["prompt_tokens"] for one in found["requests"]]
    assert 20 <= min(lengths) < max(lengths) <= 60
    assert all(6 <= sum(one["tokens"]) <= 18 for one in found["requests"])
    # Tokens that reach a busy client together have no gap between them, so only the slowest gaps are sure to be seen.
    assert found["p50_ttft_ms"] > 0 and found["p99_itl_ms"] > 0 and found["p99_itl_ms"] >= found["p50_itl_ms"] >= 0
    assert "inter-token latency" in shown and "output tokens per device-second" in shown


def counted(url: str) -> tuple[float, float]:
    """Output tokens, and latencies between tokens, that the engine has counted so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return values[f"{metrics.GENERATION_TOKENS}_total"], values[f"{metrics.INTER_TOKEN_LATENCY}_count"]


@pytest.mark.req("MET-09")
def test_client_and_engine_count_the_same(engine: str, tmp_path: Path) -> None:
    before = counted(engine)
    shape = ["--random-input-len", "16", "--random-output-len", "9", "--ignore-eos"]
    found, _ = bench(engine, tmp_path, "--num-prompts", "11", "--max-concurrency", "4", *shape)
    tokens, gaps = (after - first for after, first in zip(counted(engine), before, strict=True))
    assert found["total_output_tokens"] == tokens - 9  # one request to warm up
    assert sum(sum(one["tokens"]) - 1 for one in found["requests"]) == gaps - 8


@pytest.mark.req("MET-12")
def test_shared_prefixes_come_from_the_engines_cache(engine: str, tmp_path: Path) -> None:
    shape = [
        "--prefix-repetition-prefix-len",
        "64",
        "--prefix-repetition-suffix-len",
        "16",
        "--prefix-repetition-num-prefixes",
        "2",
    ]
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "8", "--max-concurrency", "1", *shape]
    flags += ["--seed", "7"]  # tokens that no other test has left in the cache
    found, _ = bench(engine, tmp_path, *flags, "--prefix-repetition-output-len", "2")
    assert found["total_input_tokens"] == 8 * 80
    assert found["total_cached_tokens"] == 6 * 64  # all but the first of each


@pytest.mark.slow
@pytest.mark.req("MET-13")
def test_the_reading_follows_the_load(engine: str, tmp_path: Path) -> None:
    """128 blocks of 16 tokens hold six sequences of 320: two a second leave room, two dozen at once pile up."""
    shape = ["--random-input-len", "20", "--random-output-len", "300", "--ignore-eos"]
    light, _ = bench(
        engine, tmp_path, *shape, "--num-prompts", "8", "--max-concurrency", "1", "--request-rate", "2", "--burstiness", "100"
    )
    heavy, shown = bench(engine, tmp_path, *shape, "--num-prompts", "120", "--max-concurrency", "24")
    assert light["saturation"]["reading"] == "headroom", light["saturation"]
    assert heavy["saturation"]["reading"] == "past the knee", heavy["saturation"]
    assert heavy["saturation"]["peak_kv_usage"] > 0.9 and heavy["saturation"]["mean_waiting"] > 5
    assert "past the knee" in shown


def test_a_server_that_is_not_there_is_an_exit_status_and_a_sentence() -> None:
    command = [sys.executable, "-m", "penstock.cli", "bench", "serve", "--base-url", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "penstock bench: cannot reach http://127.0.0.1:1: connection refused\n"
