"""A replica of several ranks in one pod: it answers as one process does, and comes back whole when a rank dies."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually

Object = dict[str, Any]
ALONE, PAIR = "alone", "pair"
EXACT = {"dtype": "float32"}
"""Sums over ranks have another order than those of one process: in bfloat16 a near-tie could go either way."""


def answer(system: System, model: str) -> str:
    asked = system.openai().completions.create(model=model, prompt="What does json.loads do?", max_tokens=24, temperature=0)
    return asked.choices[0].text


def children(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have started."""
    own = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return own + [below for child in own for below in children(child)]


@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_two_ranks_in_a_pod_answer_as_one_process_and_fall_together(
    system: System, namespace: str, phases: Phases, parallelism: dict[str, int]
) -> None:
    cluster = system.cluster
    pair = models.small(PAIR, engine=EXACT, pools=[{"name": "cpu", "parallelism": parallelism}])
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

        before = container()
        ranks = children(int(before["containerID"].removeprefix("process://")))
        assert len(ranks) >= 3, "the core and two ranks"
        with phases("one rank killed → the replica is there again"):
            os.kill(max(ranks), signal.SIGKILL)

            def expect_again() -> None:
                assert container()["restartCount"] > before["restartCount"]
                assert answer(system, PAIR) == said

            eventually(expect_again, seconds=120)
