"""llm-d's router picks among our engines: by their metrics under vLLM's names, and by their KV events in vLLM's form."""

import json

import httpx
import pytest

from e2e.neighbours import engines
from e2e.neighbours.engines import NAME, Engine
from e2e.neighbours.llmd.picker import Picker, precise, program
from e2e.neighbours.programs import Programs
from e2e.traffic import answers_of, clients
from e2e.waiting import eventually
from testing.ports import free_ports

PROMPT = "def parse(text):\n    return json.loads(text)\n" * 20


@pytest.fixture(scope="module")
def events() -> int:
    program()
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def two(programs: Programs, events: int) -> list[Engine]:
    return engines.ready(programs, [_ours(programs, name, events) for name in ("ours-0", "ours-1")])


@pytest.fixture(scope="module")
def picker(programs: Programs, two: list[Engine], events: int) -> Picker:
    return Picker(programs, {it.name: (it.port, {}) for it in two}, precise(two[0].url, events))


def _ours(programs: Programs, name: str, events: int) -> Engine:
    """Few sequences at a time, so that there are queues; its port is known before it starts, since its events' topic names it."""
    (port,) = free_ports(1)
    told = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{events}", "topic": f"kv@127.0.0.1:{port}@{NAME}"}
    flags = ("--metrics-compat", "vllm", "--max-num-seqs", 2, "--kv-events-config", json.dumps(told))
    return engines.penstock(programs, name, *flags, port=port)


def test_it_routes_to_all_of_them(picker: Picker, two: list[Engine]) -> None:
    for number in range(12):
        assert picker.ask(f"def f{number}(").usage.completion_tokens == 2
    for engine in two:
        attempts = picker.figure("llm_d_epp_scheduler_attempts_total", endpoint_name=engine.name, status="success")
        assert attempts == _served(engine) > 0


def test_it_sees_our_load(picker: Picker) -> None:
    def busy() -> None:
        assert picker.figure("llm_d_epp_average_running_requests") == 2
        assert picker.figure("llm_d_epp_average_queue_size") > 0

    with clients(picker.url, NAME, 8, 256) as asking:
        eventually(busy)
    assert all(answer.complete for answer in answers_of(asking))


@pytest.mark.parametrize("holder", [0, 1])
def test_it_sees_our_kv_events(picker: Picker, two: list[Engine], holder: int) -> None:
    """The prompt goes to one replica directly. The picker learns of it from that replica's events, and sends there what begins
    alike, prompt after prompt."""
    prompt = f"# {holder}\n" + PROMPT
    asked = {"model": NAME, "prompt": prompt, "max_tokens": 1}
    httpx.post(f"{two[holder].url}/v1/completions", json=asked, timeout=60).raise_for_status()

    def resident() -> None:
        assert _cached(picker, prompt + "first") > 300

    eventually(resident)
    before = [_served(engine) for engine in two]
    assert all(_cached(picker, prompt + f"then {number}") > 300 for number in range(6))
    after = [_served(engine) for engine in two]
    assert [now - then for now, then in zip(after, before, strict=True)] == [6 * (at == holder) for at in (0, 1)]


def _cached(picker: Picker, prompt: str) -> int:
    usage = picker.ask(prompt).usage
    return usage.prompt_tokens_details.cached_tokens or 0


def _served(engine: Engine) -> int:
    """Requests that an engine has ended."""
    page = httpx.get(f"{engine.url}/metrics", timeout=10).raise_for_status().text
    lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))
