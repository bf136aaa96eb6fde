"""Replicas of several ranks in one pod: they answer as one process does, and come back whole when a rank dies. They find their
pages in a shared store afterwards."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.cluster.network import GATEWAY
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually
from penstock.api import headers, metrics
from testing import patient
from testing.mooncake_processes import Mooncake

Object = dict[str, Any]
ALONE, PAIR = "alone", "pair"
EXACT = {"dtype": "float32"}
"""Sums over ranks have another order than those of one process: in bfloat16 a near-tie could go either way."""


@pytest.fixture
def store() -> Iterator[Mooncake]:
    if not Mooncake.is_installed():
        pytest.skip("Mooncake is not installed: make kv-parts")
    running = Mooncake(GATEWAY)
    yield running
    running.close()


def answer(system: System, model: str, prompt: str = "What does json.loads do?") -> str:
    asked = system.openai().completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0)
    return asked.choices[0].text


def moved_bytes(pod: Object, direction: str) -> float:
    """Of pages that have come from the shared store, `load`, or gone there, `store`."""
    return models.metric(pod, metrics.KV_OFFLOAD_BYTES, 'tier="store"', f'transfer_type="{direction}"')


def children(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have started."""
    own = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return own + [below for child in own for below in children(child)]


@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_two_ranks_in_a_pod_answer_as_one_process_and_fall_together(
    system: System, namespace: str, phases: Phases, store: Mooncake, parallelism: dict[str, int]
) -> None:
    cluster = system.cluster
    connector = {"type": "offload", "memory": "64Mi", "store": {"uri": store.uri, "size": "64Mi"}}
    pair = models.small(PAIR, engine={**EXACT, "connector": connector}, pools=[{"name": "cpu", "parallelism": parallelism}])
    (flag,) = (f"--{name}-parallel-size=2" for name in parallelism)

    def container() -> Object:
        (pod,) = models.ready_pods(cluster, namespace, PAIR, 1).values()
        (found,) = pod["status"]["containerStatuses"]
        return found

    with models.applied(cluster, namespace, models.small(ALONE, engine=EXACT), pair):
        with phases("a replica of two ranks → Ready"):
            models.wait_until_ready(cluster, namespace, ALONE)
            models.wait_until_ready(cluster, namespace, PAIR)
        said = eventually(lambda: answer(system, PAIR), seconds=120)
        assert said == eventually(lambda: answer(system, ALONE), seconds=120)
        (pod,) = models.pods(cluster, namespace, PAIR).values()
        (engine,) = pod["spec"]["containers"]
        assert flag in engine["args"] and engine["resources"]["requests"]["cpu"] == "2"

        long, already = "What does json.loads do? " * 40, moved_bytes(pod, "store")
        shared = answer(system, PAIR, long)

        def expect_stored() -> None:
            found = moved_bytes(pod, "store")
            time.sleep(1.0)
            assert already < found == moved_bytes(pod, "store"), "each rank stores its part behind the answer"

        eventually(expect_stored, seconds=60)
        before = container()
        ranks = children(int(before["containerID"].removeprefix("process://")))
        assert len(ranks) >= 3, "the core and two ranks"
        with phases("one rank killed → the replica is there again"):
            os.kill(max(ranks), signal.SIGKILL)

            def expect_again() -> None:
                assert container()["restartCount"] > before["restartCount"]
                assert answer(system, PAIR) == said

            eventually(expect_again, seconds=120)
        (pod,) = models.ready_pods(cluster, namespace, PAIR, 1).values()
        assert moved_bytes(pod, "load") == 0
        assert answer(system, PAIR, long) == shared
        assert moved_bytes(pod, "load") > 0, "the pages of the process before"


def test_requests_go_to_the_data_parallel_rank_that_holds_their_prefix(system: System, namespace: str, phases: Phases) -> None:
    # Without a prefix anywhere all of them may go to the rank that reports the quicker prefill: so the test puts each somewhere.
    texts = {f"{number} " + "What does json.loads do? " * 40: str(number % 2) for number in range(6)}

    def asked(url: str, text: str, sent: dict[str, str] | None = None) -> tuple[str, int]:
        """Which rank answered, and how much of the prompt it had."""
        body = {"model": PAIR, "prompt": text, "max_tokens": 1}
        answered = patient.post(f"{url}/v1/completions", json=body, headers=sent).raise_for_status()
        return answered.headers[headers.DATA_PARALLEL_RANK], answered.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with models.applied(system.cluster, namespace, models.small(PAIR, pools=[{"name": "cpu", "parallelism": {"data": 2}}])):
        with phases("a replica of two data-parallel ranks → Ready"):
            models.wait_until_ready(system.cluster, namespace, PAIR)
        eventually(lambda: answer(system, PAIR), seconds=120)
        (pod,) = models.ready_pods(system.cluster, namespace, PAIR, 1).values()
        for text, rank in texts.items():
            assert asked(f"http://{pod['status']['podIP']}:8000", text, {headers.DATA_PARALLEL_RANK: rank})[0] == rank
        time.sleep(1.0)  # until the events of the last blocks are there
        for text, rank in texts.items():
            found_at, cached = asked(system.url, text)
            assert found_at == rank and cached > 0
