"""A model of Prefill and Decode pools: long prompts are computed by one replica and answered by the other, through Envoy."""

import itertools
import os
import secrets
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from e2e import models
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually
from penstock.api import labels, metrics

Object = dict[str, Any]
ALONE, PAIR, SECRET = "whole", "halves", "halves-kv"
EXACT = {"dtype": "float32"}
"""A prompt that was cut where its pages end has other matrix products: in bfloat16 a near-tie could go either way."""
CONNECTOR = {"type": "transfer", "memory": "256Mi", "secretRef": {"name": SECRET}}
POOLS = [{"name": "pre", "role": "Prefill"}, {"name": "dec", "role": "Decode"}]


def prompt(number: int) -> str:
    """More than a thousand tokens that no other prompt begins with."""
    return f"{number} " + "What does json.loads do? And what json.dumps? " * 70


def answer(system: System, model: str, text: str, tokens: int = 24) -> str:
    asked = system.openai().completions.create(model=model, prompt=text, max_tokens=tokens, temperature=0)
    return asked.choices[0].text


def lent(pod: Object) -> float:
    """Prompts that the decode replica had computed elsewhere."""
    lines = httpx.get(f"http://{pod['status']['podIP']}:8000/metrics", timeout=5).text.splitlines()
    found = [line for line in lines if line.startswith(metrics.REMOTE_PREFILLS) and 'result="lent"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_a_pair_of_pools_answers_as_one_replica_and_outlives_its_prefill_replica(
    system: System, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    cluster = system.cluster
    # Its prompts take so long that a hop pays.
    source = {"uri": f"file://{models.deep(tmp_path / 'deep', 24)}"}
    literal = f"--from-literal=secret={secrets.token_hex(32)}"
    cluster.kubectl("create", "secret", "generic", SECRET, f"--namespace={namespace}", literal)
    pair = models.small(PAIR, source=source, engine={**EXACT, "connector": CONNECTOR}, pools=POOLS, replicas=None)

    def of_pool(name: str) -> Object:
        (pod,) = (it for it in models.pods(cluster, namespace, PAIR).values() if it["metadata"]["labels"][labels.POOL] == name)
        return pod

    with (
        models.applied(cluster, namespace, models.small(ALONE, source=source, engine=EXACT), pair),
        ThreadPoolExecutor(3) as others,
    ):
        with phases("a Prefill and a Decode pool → Ready"):
            models.wait_until_ready(cluster, namespace, ALONE)
            models.wait_until_ready(cluster, namespace, PAIR)
        eventually(lambda: answer(system, PAIR, "json"), seconds=120)
        decode, numbers = of_pool("dec"), itertools.count()

        def expect_lent(more_than: float) -> None:
            """A hop pays while the decode replica has other requests."""
            number = next(numbers)
            streams = [others.submit(answer, system, PAIR, f"{number} {it}", 300) for it in range(3)]
            assert answer(system, PAIR, prompt(number)) == answer(system, ALONE, prompt(number))
            assert all(stream.result() for stream in streams)
            assert lent(decode) > more_than

        with phases("a long prompt computed by the Prefill pool"):
            eventually(lambda: expect_lent(0), seconds=120)
        container = of_pool("pre")["status"]["containerStatuses"][0]
        with phases("the prefill replica killed → the decode replica computes prompts itself"):
            os.kill(int(container["containerID"].removeprefix("process://")), signal.SIGKILL)
            for number in range(1000, 1003):
                assert answer(system, PAIR, prompt(number)) == answer(system, ALONE, prompt(number))
        before = lent(decode)

        def expect_again() -> None:
            assert of_pool("pre")["status"]["containerStatuses"][0]["restartCount"] > container["restartCount"]
            expect_lent(before)

        with phases("the prefill replica is there again"):
            eventually(expect_again, seconds=120)
