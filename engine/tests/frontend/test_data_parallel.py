"""Several cores behind one frontend: the pick, what they are together, and `penstock serve --data-parallel-size`."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from frontend_process import Server, make_llama, serving
from test_parallel_e2e import PROMPTS, answers, children, started_since, wait_gone

from penstock.api import events, load_report
from penstock.api.events import BlockStored
from penstock.api.load_report import LoadReport
from penstock.api.merged_load import merged
from penstock.engine import LLM, ConfigError, SamplingParams
from penstock.engine.args import EngineArgs
from penstock.engine.commands import PinPrefix, ResetPrefixCache
from penstock.engine.core.ipc.calls import CommandRefused
from penstock.engine.frontend.data_parallel import busyness, check_ports, combined, pick
from testing.ports import free_ports
from testing.replays import replayed

pytestmark = pytest.mark.slow

LONG = 3000
"""Tokens of a stream that takes seconds."""


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[str]:
    """The answers of one core."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    with LLM(str(llama), in_process=True, kv_cache_memory_bytes=4 << 20) as one:
        return [output.outputs[0].text for output in one.generate(PROMPTS, greedy, progress=False)]


def post(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"content-type": "application/json", **headers}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=60) as answer:
        return json.load(answer)


def on_rank(server: Server, rank: int | str, prompt: str = "the river turns the wheel", **fields: Any) -> tuple[int, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0.0, **fields}
    return post(server, "/v1/completions", body, **{"X-data-parallel-rank": str(rank)})


def finished(server: Server) -> Counter[str]:
    """Finished sequences by engine."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("penstock_request_success_total{"):
            found[line.partition('engine="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return found


def test_the_rank_with_the_least_to_do_is_picked_and_equal_ones_in_turn():
    assert [pick([0, 0, 0], turn) for turn in range(4)] == [0, 1, 2, 0]
    assert pick([5, 3, 4], 0) == 1
    busy = LoadReport(1, 1, num_requests_running=2, num_requests_waiting={"capacity": 1})
    assert busyness(busy, 0) == 6 and busyness(None, 3) == 3
    assert busyness(LoadReport(1, 1), 4) == 4, "the report is older than what was sent"


def test_ranks_together_report_as_one_replica_that_replaces_the_first_ranks_own_report():
    first = LoadReport(7, 5, 1, {"capacity": 2}, 8, 0.5, 100, 50, decode_step_s=0.1, transfer_s=9, adapters=("a", "b"))
    other = LoadReport(9, 3, 3, {"capacity": 1, "lora": 1}, 8, 0.1, 300, 270, decode_step_s=0.3, adapters=("b",))
    both = merged([first, other])
    assert (both.epoch, both.seq, both.num_requests_running, both.max_num_seqs) == (7, 8, 4, 16)
    assert both.num_requests_waiting == {"capacity": 3, "lora": 1}
    assert both.kv_cache_usage_perc == pytest.approx(0.2) and both.kv_blocks_reclaimable == 320
    assert both.decode_step_s == 0.3 and both.adapters == ("b",) and both.transfer_s == 9


def test_a_command_is_refused_where_a_rank_refuses_it_and_a_pin_where_all_do():
    no = CommandRefused("no")
    assert combined(ResetPrefixCache(), [None, None]) is None
    with pytest.raises(CommandRefused, match="data-parallel rank 1: no"):
        combined(ResetPrefixCache(), [None, no])
    pin = PinPrefix("p", [1])
    assert combined(pin, [no, {"tokens": 16}]) == {"tokens": 16, "data_parallel_ranks": [None, {"tokens": 16}]}
    with pytest.raises(CommandRefused):
        combined(pin, [no, no])


def test_event_ports_of_ranks_that_would_meet_are_refused():
    check_ports(5557, 5558, 8)
    with pytest.raises(ConfigError, match="both would use 5559"):
        check_ports(5557, 5559, 2)
    with pytest.raises(ConfigError, match="65536"):
        check_ports(5557, 65_534, 2)


@pytest.mark.req("PD-04")
def test_each_rank_lends_pages_on_ports_of_its_own_and_under_a_name_of_its_own(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of many bytes")
    transfer = {"kv_connector": "transfer", "kv_role": "kv_both", "kv_port": 20_000}
    model = Path(__file__).parents[3] / "examples/models/penstock-tiny"
    flags: dict[str, Any] = {"model": str(model), "device": "cpu", "kv_offload_memory_bytes": 2**20, "data_parallel_size": 3}
    flags |= {"kv_transfer_secret_file": str(secret), "tensor_parallel_size": 2}
    config = EngineArgs(**flags, kv_transfer_config=transfer).config()
    given = [config.of_rank(rank).transfer for rank in range(3)]
    assert [it.port for it in given if it is not None] == [20_000, 20_002, 20_004]
    assert len({it.engine_id for it in given if it is not None}) == 3
    with pytest.raises(ConfigError, match="kv_port 65531: 6 ranks lend on ports up to 65536"):
        EngineArgs(**flags, kv_transfer_config=transfer | {"kv_port": 65_531}).config()


def test_python_has_data_parallel_ranks_too(llama, expected):
    params, size = SamplingParams(max_tokens=12, temperature=0.0), {"kv_cache_memory_bytes": 4 << 20}
    before = children(os.getpid())
    with LLM(str(llama), data_parallel_size=2, **size) as two:
        cores = started_since(before)
        assert [output.outputs[0].text for output in two.generate(PROMPTS, params, progress=False)] == expected
        assert sorted(len(rank.egress) for rank in two._llm.ranks) == [0, 0]
        counts = [rank.metrics.generation_tokens.by_value(rank.metrics.table.totals())[""] for rank in two._llm.ranks]
        assert min(counts) > 0, "requests go to both"
    wait_gone(*cores)
    with pytest.raises(ConfigError, match="needs a process for each rank"):
        LLM(str(llama), in_process=True, data_parallel_size=2, **size)


@pytest.mark.req("DX-25")
def test_two_cores_answer_as_one_and_a_dead_one_fails_its_own_requests_alone(llama, expected, tmp_path):
    """Two frontends, too: what is true of one is true of each."""
    flags = ("-dp", "2", "--api-server-count", "2", "--enable-control-endpoints")
    with serving(llama, tmp_path / "two.log", *flags) as server:
        below = children(server.process.pid)
        cores = [pid for pid in below if "core.ipc.process" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(cores) == 2
        assert answers(server) == expected
        before = finished(server)
        assert sum(before.values()) == len(PROMPTS)
        texts = {on_rank(server, rank)[1]["choices"][0]["text"] for rank in (0, 1, 1)}
        assert texts == {expected[0]}
        assert finished(server) - before == {"0": 1, "1": 2}
        for rank in ("2", "-1", "x"):
            status, told = on_rank(server, rank)
            assert status == 400 and "from 0 to 1" in told["error"]["message"], told
        _check_ports_and_load(server)
        _check_commands(server)
        assert answers(server) == expected
        _check_death(server, cores, "was killed by signal 9")
        assert server.process.wait(60) == 1
        wait_gone(*below)


@pytest.mark.req("DX-25")
def test_a_core_on_another_node_answers_behind_the_same_server_and_dies_alone(llama, expected, tmp_path):
    """The other node is started as a person does; of two frontends, each reaches both cores."""
    [port] = free_ports(1)
    shared = ("-dp", "2", "--data-parallel-size-local", "1", "-dpa", "127.0.0.1", "-dpp", str(port))
    small = ("--kv-cache-memory-bytes", str(4 << 20), "--served-model-name", "tiny", "random")
    command = [sys.executable, "-m", "penstock.cli", "serve", str(llama), *shared, *small, "--headless", "-dpr", "1"]
    with (tmp_path / "other.log").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as other:
        try:
            with serving(llama, tmp_path / "two.log", *shared, "--api-server-count", "2", "--enable-control-endpoints") as server:
                below, [far] = children(server.process.pid), children(other.pid)
                assert sorted(_modules(below)) == ["core.ipc.process", "core.ipc.stand_in", *["frontend.processes.process"] * 2]
                assert answers(server) == expected
                before = finished(server)
                assert {on_rank(server, rank)[1]["choices"][0]["text"] for rank in (0, 1, 1)} == {expected[0]}
                assert finished(server) - before == {"0": 1, "1": 2}
                _check_ports_and_load(server)
                _check_commands(server)
                assert answers(server) == expected
                _check_death(server, [below[0], far], "is gone; the log of its node says why")
                assert server.process.wait(60) == 1
                wait_gone(*below, far)
            assert other.wait(60) == 1
        finally:
            other.kill()
    assert "the core of data-parallel rank 1 was killed by signal 9" in (tmp_path / "other.log").read_text()


def _modules(pids: list[int]) -> list[str]:
    """The part of the engine that each process runs."""
    told = (Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    return [line.partition("penstock.engine.")[2].rstrip("\0") for line in told]


def _check_ports_and_load(server: Server) -> None:
    """Each rank tells of its own blocks on ports of its own, and of its load."""
    ports = get(server, "/version")["data_parallel_ranks"]
    assert [rank["events_port"] - ports[0]["events_port"] for rank in ports] == [0, 2]
    load = get(server, "/load")
    assert load["max_num_seqs"] == sum(rank["max_num_seqs"] for rank in load["data_parallel_ranks"]) == 512
    for rank in (0, 1):
        assert on_rank(server, rank, f"{rank} water and stone " * 20)[0] == 200
    _check_report_on_answers(server)
    stored = [_stored(rank["replay_port"]) for rank in ports]
    assert stored[0] - stored[1] and stored[1] - stored[0]


def _check_report_on_answers(server: Server) -> None:
    """The load report on an answer is of all ranks, or of the one that the request has named. The one that ran it is named."""

    def asked(path: str = "/health", body: Any = None, **headers: str) -> tuple[str | None, int]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"endpoint-load-metrics-format": "JSON", "content-type": "application/json", **headers}
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=60) as answer:
            report = load_report.decode(answer.headers["endpoint-load-metrics"])
            return answer.headers["x-data-parallel-rank"], report.max_num_seqs

    assert asked() == (None, 512)
    assert asked(**{"X-data-parallel-rank": "1"}) == ("1", 256)
    body = {"model": "tiny", "prompt": "the river", "max_tokens": 2}
    before, ran = finished(server), Counter[str | None]()
    for stream in (True, False) * 4:
        rank, seqs = asked("/v1/completions", {**body, "stream": stream})
        ran[rank] += 1
        assert seqs == 512
    assert finished(server) - before == ran and len(ran) == 2
    status, told = post(server, "/v1/completions", body, **{"x-data-parallel-rank": "1", "x-penstock-timeline": "true"})
    assert status == 200 and [it["data_parallel_rank"] for it in told["timeline"]] == [1]


def _check_commands(server: Server) -> None:
    """All ranks are told."""
    assert post(server, "/reset_prefix_cache")[0] == 200
    for rank in (0, 1):
        usage = on_rank(server, rank, f"{rank} water and stone " * 20)[1]["usage"]
        assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    assert post(server, "/sleep?level=1")[0] == 200
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    assert [on_rank(server, rank)[0] for rank in (0, 1)] == [503, 503]
    assert post(server, "/wake_up")[0] == 200 and post(server, "/reload_weights")[0] == 200


def _check_death(server: Server, cores: list[int], how: str) -> None:
    """A core that is killed: its stream fails at once, and the other one ends as if nothing had happened."""
    with _stream(server, 0) as first, _stream(server, 1) as second, ThreadPoolExecutor(2) as readers:
        first.readline(), second.readline()
        reading = [readers.submit(lambda stream=stream: _last(stream.read().decode())) for stream in (first, second)]
        os.kill(cores[1], signal.SIGKILL)
        [(lost_rank, lost)] = _lost(reading)
        with pytest.raises((urllib.error.HTTPError, urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"{server.url}/health", timeout=30)
        assert lost["error"]["code"] == "engine_dead" and how in lost["error"]["message"]
        assert f"data-parallel rank {lost_rank}: " in server.log.read_text()
        assert reading[1 - lost_rank].result(120)["usage"]["completion_tokens"] == LONG


def _stored(port: int) -> set[bytes]:
    """Hashes of the blocks that a rank's replay tells of."""
    told = [event for payload in replayed(port) for event in events.decode(payload).events]
    return {block for event in told if isinstance(event, BlockStored) for block in event.block_hashes}


def _stream(server: Server, rank: int) -> Any:
    fields = {"max_tokens": LONG, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "tiny", "prompt": "a mill", **fields}
    headers = {"content-type": "application/json", "X-data-parallel-rank": str(rank)}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


def _last(told: str) -> Any:
    """The last event of a stream."""
    return json.loads([line for line in told.splitlines() if line.startswith("data: {")][-1].removeprefix("data: "))


def _lost(reading: "list[Future[Any]]") -> list[tuple[int, Any]]:
    """The stream that ends with an error, with its rank: it ends long before the others."""
    done, _ = wait(reading, 60, FIRST_COMPLETED)
    return [(rank, each.result()) for rank, each in enumerate(reading) if each in done and "error" in each.result()]
