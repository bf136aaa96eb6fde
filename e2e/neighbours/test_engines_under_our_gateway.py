"""Engines of others, two replicas each, behind our gateway and a real Envoy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from e2e.neighbours import engines
from e2e.neighbours.engines import NAME, Engine, Start
from e2e.neighbours.gateway import Gateway
from e2e.neighbours.programs import Programs, programs
from e2e.traffic import Client, answers_of, clients
from e2e.waiting import eventually

PROMPT = "def parse(text):\n    return json.loads(text)\n" * 20


@dataclass(frozen=True)
class Kind:
    """A kind of engine.

    Args:
        start: Starts one.
        recognised: What the gateway says that it runs.
        speeds: Whether its metrics tell how fast it computes.
        orca: Whether its answers tell its load to who asks.
        events: Whether it publishes KV events.
    """

    start: Start
    recognised: str
    speeds: bool = False
    orca: bool = False
    events: bool = False


KINDS = {
    "vllm": Kind(engines.vllm_cpu, "vllm", speeds=True, orca=True, events=True),
    "sglang-shaped": Kind(engines.sglang_shaped, "sglang", events=True),
    "llama.cpp": Kind(engines.llama_cpp, "llamacpp", speeds=True),
}


@dataclass(frozen=True)
class Stage:
    """Two replicas of a kind."""

    kind: Kind
    programs: Programs
    two: list[Engine]


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    kind = KINDS[request.param]
    with programs(tmp_path_factory.mktemp("neighbours")) as started:
        two = [kind.start(started, f"engine-{number}") for number in range(2)]
        yield Stage(kind, started, engines.ready(started, two))


@pytest.fixture(scope="module")
def gateway(stage: Stage) -> Gateway:
    """With a fleet file, which knows where the events are."""
    return Gateway(stage.programs, stage.two, named=True)


def test_addresses_alone_are_enough(stage: Stage) -> None:
    """The names are those of /v1/models, the engine is recognised, its load is read."""
    found = Gateway(stage.programs, stage.two, named=False)
    assert [model.id for model in found.api.models.list()] == [NAME]
    assert found.ask("import ")[1].usage.completion_tokens == 4

    def known() -> None:
        assert all(replica["report"] for replica in found.replicas().values())
        assert found.log().count(f"runs {stage.kind.recognised}") == 2

    eventually(known)


def test_the_load_is_that_of_its_metrics(stage: Stage, gateway: Gateway) -> None:
    def busy() -> None:
        assert sum(it["report"]["num_requests_running"] for it in gateway.replicas().values()) >= 2

    with clients(gateway.url, NAME, 4, 128) as asking:
        eventually(busy)
    assert all(answer.complete for answer in answers_of(asking))

    def measured() -> None:
        reports = [it["report"] for it in gateway.replicas().values()]
        assert all(report["num_requests_running"] == 0 for report in reports)
        if stage.kind.speeds:
            assert any(report["prefill_tokens_per_s"] > 0 and report["decode_step_s"] > 0 for report in reports)
        if stage.kind.events:
            assert all(report["kv_blocks_total"] > 100 for report in reports)

    eventually(measured)


def test_its_load_comes_with_its_answers_too(stage: Stage) -> None:
    """In ORCA headers, for which our Envoy asks: a gateway that never looks at metrics knows who has answered, and no other."""
    if not stage.kind.orca:
        pytest.skip("it has no ORCA headers")
    told = [replace(engine, kind="vllm") for engine in stage.two]
    blind = Gateway(stage.programs, told, named=True, poll_s=0)
    assert not any(it["report"] for it in blind.replicas().values())
    replica, _ = blind.ask("import ")

    def known() -> None:
        assert {name for name, it in blind.replicas().items() if it["report"]} == {replica}

    eventually(known)


def test_a_prefix_is_found_where_it_was_computed(stage: Stage, gateway: Gateway) -> None:
    """With KV events the prompt goes to a replica directly, and the picker learns of it from that replica alone; without, the
    picker remembers where it sent it."""
    if stage.kind.events:
        holder = stage.two[1].endpoint
        asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 1}
        httpx.post(f"http://{holder}/v1/completions", json=asked, timeout=60).raise_for_status()
    else:
        holder, _ = gateway.ask(PROMPT)

    def resident() -> None:
        replica, answer = gateway.ask(PROMPT + "print(")
        decision = gateway.decided()
        held = {it["endpoint"]: it["resident_tokens"] for it in decision["candidates"]}
        # The GGUF file adds no token before the prompt, as the tokenizer of the checkpoint does.
        assert decision["tokens_unknown"] is None and decision["prompt_tokens"] - answer.usage.prompt_tokens in (0, 1)
        assert held[holder] > 0.9 * (decision["prompt_tokens"] - 20)
        assert replica == holder

    eventually(resident)


def test_a_replica_that_dies_costs_its_own_answers_alone(stage: Stage, gateway: Gateway) -> None:
    """Last in this file: one replica is gone after it."""
    dead = stage.two[1]
    with clients(gateway.url, NAME, 6, 16) as asking:
        eventually(lambda: _both_answered(asking, stage.two))
        stage.programs.kill(dead.name)
        before = {client: len(client.answers) for client in asking}
        eventually(lambda: _each_went_on(before, 3), 120)
    answers = answers_of(asking)
    failed = [answer for answer in answers if not answer.complete]
    assert len(failed) <= len(asking), failed
    assert all(answer.retryable for answer in failed), [repr(answer.error) for answer in failed if not answer.retryable]
    assert all(answer.complete and answer.replica != dead.endpoint for answer in answers[-6:])


def _both_answered(asking: list[Client], two: list[Engine]) -> None:
    assert {answer.replica for client in asking for answer in client.answers} == {engine.endpoint for engine in two}


def _each_went_on(before: dict[Client, int], more: int) -> None:
    assert all(len(client.answers) >= count + more for client, count in before.items())
