"""Real vLLM replicas behind our gateway and a real Envoy."""

import httpx
import pytest

from e2e.neighbours import engines
from e2e.neighbours.engines import NAME, Engine
from e2e.neighbours.gateway import Gateway
from e2e.neighbours.programs import Programs
from e2e.traffic import answers_of, clients
from e2e.waiting import eventually

PROMPT = "def parse(text):\n    return json.loads(text)\n" * 20
TOKENS = 16


@pytest.fixture(scope="module")
def two(programs: Programs) -> list[Engine]:
    return engines.ready(programs, [engines.vllm_cpu(programs, name) for name in ("vllm-0", "vllm-1")])


@pytest.fixture(scope="module")
def gateway(programs: Programs, two: list[Engine]) -> Gateway:
    """With a fleet file, which knows where the events are."""
    return Gateway(programs, two, named=True)


def test_addresses_alone_are_enough(programs: Programs, two: list[Engine]) -> None:
    """The names are those of /v1/models, the engine is recognised, its load is read."""
    found = Gateway(programs, two, named=False)
    assert [model.id for model in found.api.models.list()] == [NAME]
    assert found.ask("import ")[1].usage.completion_tokens == 4

    def known() -> None:
        reports = [replica["report"] for replica in found.replicas().values()]
        assert len(reports) == 2 and all(report and report["kv_blocks_total"] > 100 for report in reports)

    eventually(known)
    assert found.log().count("runs vllm") == 2


def test_the_load_is_that_of_its_metrics(gateway: Gateway) -> None:
    def busy() -> None:
        running = sum(it["report"]["num_requests_running"] for it in gateway.replicas().values())
        assert running >= 2

    with clients(gateway.url, NAME, 4, 128) as asking:
        eventually(busy)
    assert all(answer.complete for answer in answers_of(asking))

    def measured() -> None:
        reports = [it["report"] for it in gateway.replicas().values()]
        assert all(report["num_requests_running"] == 0 for report in reports)
        assert any(report["prefill_tokens_per_s"] > 0 and report["decode_step_s"] > 0 for report in reports)

    eventually(measured)


def test_its_load_comes_with_its_answers_too(two: list[Engine]) -> None:
    """vLLM answers ORCA's request header, by which our Envoy asks; the picker reads these names."""
    asked = {"model": NAME, "prompt": "import ", "max_tokens": 1}
    said = httpx.post(f"{two[0].url}/v1/completions", json=asked, headers={"endpoint-load-metrics-format": "TEXT"}, timeout=60)
    assert "kv_cache_usage_perc" in said.headers["endpoint-load-metrics"]


def test_a_prefix_is_found_where_it_was_computed(gateway: Gateway, two: list[Engine]) -> None:
    """By KV events: the prompt goes to a replica directly, and the picker learns of it from the replica alone."""
    holder = two[1]
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 1}
    httpx.post(f"{holder.url}/v1/completions", json=asked, timeout=60).raise_for_status()

    def resident() -> None:
        replica, answer = gateway.ask(PROMPT + "print(")
        decision = gateway.decided()
        held = {it["endpoint"]: it["resident_tokens"] for it in decision["candidates"]}
        assert decision["tokens_unknown"] is None and decision["prompt_tokens"] == answer.usage.prompt_tokens
        assert held[holder.endpoint] > 0.9 * (decision["prompt_tokens"] - 20)
        assert replica == holder.endpoint

    eventually(resident)


def test_a_replica_that_dies_costs_its_own_answers_alone(gateway: Gateway, programs: Programs, two: list[Engine]) -> None:
    """Last in this file: one replica is gone after it."""
    dead = two[1]
    with clients(gateway.url, NAME, 6, TOKENS) as asking:
        eventually(lambda: _both_answered(asking, two))
        programs.kill(dead.name)
        before = {client: len(client.answers) for client in asking}
        eventually(lambda: _each_went_on(before, 3), 120)
    answers = answers_of(asking)
    failed = [answer for answer in answers if not answer.complete]
    assert len(failed) <= len(asking), failed
    assert all(answer.retryable for answer in failed), [repr(answer.error) for answer in failed if not answer.retryable]
    assert all(answer.complete and answer.replica != dead.endpoint for answer in answers[-6:])


def _both_answered(asking: list, two: list[Engine]) -> None:
    assert {answer.replica for client in asking for answer in client.answers} == {engine.endpoint for engine in two}


def _each_went_on(before: dict, more: int) -> None:
    assert all(len(client.answers) >= count + more for client, count in before.items())
