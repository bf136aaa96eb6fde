"""Pausing, sleeping and reloading over HTTP, on a real engine."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend_process import Server, make_llama, serving

from penstock.api.headers import RETRIABLE

FLAG = "--enable-control-endpoints"


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(llama, tmp_path_factory.mktemp("log") / "serve.log", FLAG) as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, max_tokens: int = 24, word: str = "river") -> httpx.Response:
    prompt = f"the {word} turns the wheel and the wheel turns the mill"
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


class Asking(threading.Thread):
    """A request under way."""

    def __init__(self, http: httpx.Client, max_tokens: int, word: str = "river") -> None:
        super().__init__()
        self._ask = lambda: ask(http, max_tokens, word)
        self.start()

    def run(self) -> None:
        self.response = self._ask()

    def done(self) -> httpx.Response:
        self.join(60)
        return self.response


def until_load(http: httpx.Client, running: int, waiting: int = 0) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        report = http.get("/load").json()  # an error until the core has said something
        if report.get("num_requests_running") == running and sum(report["num_requests_waiting"].values()) == waiting:
            return
        time.sleep(0.01)
    raise AssertionError(report)


def test_a_prefix_is_pinned_by_its_tokens(http: httpx.Client) -> None:
    prompt = "the river turns the wheel and the wheel turns the mill " * 3
    tokens = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    pin = {"name": "system", "tokens": tokens}
    unknown = http.post("/pin_prefix", json=pin)
    assert unknown.status_code == 409 and "send it first" in unknown.json()["error"]["message"]
    http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1}).raise_for_status()
    pinned = http.post("/pin_prefix", json=pin)
    assert pinned.status_code == 200 and 0 < int(pinned.json()["tokens"]) <= len(tokens)
    refused = http.post("/reset_prefix_cache")
    assert refused.status_code == 409 and "are pinned" in refused.json()["error"]["message"]
    for wrong, param in (({"name": "x"}, "tokens"), ({**pin, "tokens": [-1]}, "tokens"), ({**pin, "weight": 1}, "weight")):
        answer = http.post("/pin_prefix", json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"].partition("[")[0]) == (400, param)
    assert http.post("/unpin_prefix", params={"name": "system"}).status_code == 200
    assert http.post("/unpin_prefix", params={"name": "system"}).status_code == 409
    assert http.post("/reset_prefix_cache").status_code == 200


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/unpin_prefix", "name"),
        ("/sleep?depth=1", "depth"),
        ("/pause?mode=gently", "mode"),
        ("/resume?now=true", "now"),
        ("/wake_up?tags=weights&tags=soul", "tags"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests"),
    ],
)
def test_bad_parameters_are_named(http: httpx.Client, path: str, param: str) -> None:
    answer = http.post(path)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert not http.get("/is_paused").json()["is_paused"]


@pytest.mark.req("SCH-13")
def test_what_a_pause_keeps_and_what_comes_during_it_goes_on_after_it(http: httpx.Client) -> None:
    alone = [text(ask(http, 2000)), text(ask(http, 8, "mill"))]
    kept = Asking(http, 2000)
    until_load(http, running=1)
    assert http.post("/pause?mode=keep").status_code == 200
    assert http.get("/is_paused").json() == {"is_paused": True} and http.get("/is_sleeping").json() == {"is_sleeping": False}
    came = Asking(http, 8, "mill")
    until_load(http, running=0, waiting=2)
    assert http.get("/ready").status_code == 200
    assert http.post("/resume").status_code == 200
    assert [text(kept.done()), text(came.done())] == alone
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_a_pause_that_aborts_sends_clients_elsewhere_and_a_busy_cache_is_not_reset(http: httpx.Client) -> None:
    until_load(http, running=0)  # an answer may be here before the core has let go of its request
    running = Asking(http, 4000)  # nearly all that fits: it must not end before the pause
    until_load(http, running=1)
    refused = http.post("/reset_prefix_cache")
    assert refused.status_code == 409 and "1 requests hold blocks" in refused.json()["error"]["message"]
    assert http.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200
    assert http.post("/pause").status_code == 200
    answer = running.done()
    assert answer.status_code == 503 and answer.headers[RETRIABLE] == "true" and answer.json()["error"]["code"] == "paused"
    assert http.post("/resume").status_code == 200 and http.post("/reset_prefix_cache").status_code == 200


@pytest.mark.req("MEM-06", "MEM-10")
def test_an_engine_sleeps_out_of_the_way_of_traffic_and_answers_the_same_after(http: httpx.Client, server: Server) -> None:
    expected = text(ask(http))
    for level, cures in ((1, ["/wake_up"]), (2, ["/wake_up", "/reload_weights"])):
        assert http.post(f"/sleep?level={level}").status_code == 200
        for cure in cures:
            assert http.get("/is_sleeping").json() == {"is_sleeping": True}
            for refused in (ask(http), http.get("/ready")):
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "asleep"
                assert refused.headers[RETRIABLE] == "true" and "retry-after" in refused.headers
            assert http.get("/health").status_code == 200 and http.get("/v1/models").status_code == 200
            assert http.post("/resume").status_code == 409
            assert http.post(cure).status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": False} and http.get("/ready").status_code == 200
        answer = ask(http).json()
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "found in a cache that was thrown away"


def test_other_weights_give_other_answers_and_wrong_ones_change_nothing(
    http: httpx.Client, llama: Path, tokenizer_files: Path, tmp_path: Path
) -> None:
    expected = text(ask(http))
    wrong: Any = http.post("/reload_weights", params={"path": str(tmp_path)})
    assert wrong.status_code == 409 and "cannot be read" in wrong.json()["error"]["message"]
    assert text(ask(http)) == expected
    other = make_llama(tmp_path / "other", tokenizer_files, seed=1)
    running = Asking(http, 800)
    until_load(http, running=1)
    assert http.post("/reload_weights", params={"path": str(other)}).status_code == 200
    assert text(ask(http)) != expected
    assert running.done().json()["usage"]["completion_tokens"] == 800, "a running request goes on with the new weights"
    assert http.post("/reload_weights", params={"path": str(llama)}).status_code == 200
    assert text(ask(http)) == expected


def test_idle_processes_use_next_to_no_cpu(server: Server) -> None:
    pids = [server.process.pid, server.core_pid()]
    tries = [used_and_woken(pids)]
    while tries[-1][0] > 0.02 or tries[-1][1] > 12:  # what was still to do, or a busy machine: it gets quiet, and not at once
        assert len(tries) < 12, f"never less of a core, and fewer wakes a second, than {tries}"
        tries.append(used_and_woken(pids))


def used_and_woken(pids: list[int]) -> tuple[float, float]:
    """Of each, over two seconds, the most: the share of a core, and wakes a second."""
    before, began = [(cpu_seconds(pid), voluntary_switches(pid)) for pid in pids], time.monotonic()
    time.sleep(2)
    seconds = time.monotonic() - began
    now = [(cpu_seconds(pid), voluntary_switches(pid)) for pid in pids]
    used, woken = ([(b[at] - a[at]) / seconds for a, b in zip(before, now, strict=True)] for at in range(2))
    return max(used), max(woken)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def voluntary_switches(pid: int) -> int:
    """Of all its threads: how often they went to sleep, hence woke up."""
    status = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(one.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for one in status)


def test_a_drain_waits_for_what_a_pause_keeps_and_a_command_lets_it_go_on(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "serve.log", FLAG) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        assert http.post("/pause?mode=keep").status_code == 200
        kept = Asking(http, 700)  # now, not before: it might end before the pause
        until_load(http, running=0, waiting=1)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/ready").json().get("error", {}).get("code") == "draining")
        refused = ask(http)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert kept.is_alive()
        assert http.post("/resume").status_code == 200
        assert kept.done().json()["usage"]["completion_tokens"] == 700
        assert running.process.wait(60) == 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
