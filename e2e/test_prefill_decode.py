"""A model of Prefill and Decode pools: long prompts are computed by one replica and answered by the other, through Envoy."""

import itertools
import os
import secrets
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.traffic import Client, answers_of, clients, expect_no_loss
from e2e.waiting import eventually
from penstock.api import labels, metrics

Object = dict[str, Any]
ALONE, PAIR, SECRET = "whole", "halves", "halves-kv"
EXACT = {"dtype": "float32"}
"""A prompt that was cut where its pages end has other matrix products: in bfloat16 a near-tie could go either way."""
CONNECTOR = {"type": "transfer", "memory": "256Mi", "secretRef": {"name": SECRET}}
POOLS = [{"name": "pre", "role": "Prefill"}, {"name": "dec", "role": "Decode"}]
TOKENS = 60


def prompt(number: int) -> str:
    """More than a thousand tokens that no other prompt begins with."""
    return f"{number} " + "What does json.loads do? And what json.dumps? " * 70


def answer(system: System, model: str, text: str, tokens: int = 24) -> str:
    asked = system.openai().completions.create(model=model, prompt=text, max_tokens=tokens, temperature=0)
    return asked.choices[0].text


def lent(pod: Object) -> float:
    """Prompts that the decode replica had computed elsewhere."""
    return models.metric(pod, metrics.REMOTE_PREFILLS, 'result="lent"')


def test_a_pair_of_pools_answers_as_one_replica_and_outlives_either_side(
    system: System, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    cluster = system.cluster
    # Its prompts take so long that a hop pays.
    source = {"uri": f"file://{models.deep(tmp_path / 'deep', 24)}"}
    literal = f"--from-literal=secret={secrets.token_hex(32)}"
    cluster.kubectl("create", "secret", "generic", SECRET, f"--namespace={namespace}", literal)
    pair = models.small(PAIR, source=source, engine={**EXACT, "connector": CONNECTOR}, pools=POOLS, replicas=None)

    def of_pool(name: str) -> list[Object]:
        return [it for it in models.pods(cluster, namespace, PAIR).values() if it["metadata"]["labels"][labels.POOL] == name]

    def container_of(name: str) -> Object:
        (pod,) = of_pool(name)
        return pod["status"]["containerStatuses"][0]

    def lent_to_any() -> float:
        return sum(lent(pod) for pod in of_pool("dec"))

    with (
        models.applied(cluster, namespace, models.small(ALONE, source=source, engine=EXACT), pair),
        ThreadPoolExecutor(3) as others,
    ):
        with phases("a Prefill and a Decode pool → Ready"):
            models.wait_until_ready(cluster, namespace, ALONE)
            models.wait_until_ready(cluster, namespace, PAIR)
        eventually(lambda: answer(system, PAIR, "json"), seconds=120)
        numbers = itertools.count()

        def expect_lent(more_than: float) -> None:
            """A hop pays while the decode replica has other requests."""
            number = next(numbers)
            streams = [others.submit(answer, system, PAIR, f"{number} {it}", 300) for it in range(3)]
            assert answer(system, PAIR, prompt(number)) == answer(system, ALONE, prompt(number))
            assert all(stream.result() for stream in streams)
            assert lent_to_any() > more_than

        with phases("a long prompt computed by the Prefill pool"):
            eventually(lambda: expect_lent(0), seconds=120)
        container = container_of("pre")
        with phases("the prefill replica killed → the decode replica computes prompts itself"):
            os.kill(int(container["containerID"].removeprefix("process://")), signal.SIGKILL)
            for number in range(1000, 1003):
                assert answer(system, PAIR, prompt(number)) == answer(system, ALONE, prompt(number))
        before = lent_to_any()

        def expect_again() -> None:
            assert container_of("pre")["restartCount"] > container["restartCount"]
            expect_lent(before)

        with phases("the prefill replica is there again"):
            eventually(expect_again, seconds=120)
        container = container_of("dec")
        with clients(system.url, PAIR, 2, TOKENS) as asking, phases("the decode replica killed under load → there again"):
            eventually(lambda: expect_streams(asking))
            os.kill(int(container["containerID"].removeprefix("process://")), signal.SIGKILL)
            killed = time.monotonic()
            eventually(lambda: expect_answered(asking, killed), seconds=120)
        answers = answers_of(asking)
        lost = [it for it in answers if not it.complete]
        assert lost and all(it.retryable for it in lost), "those of the replica that died fail, and so that they are sent again"
        expect_no_loss([it for it in answers if it.complete], TOKENS)

        with clients(system.url, PAIR, 2, TOKENS) as asking:
            with phases("both pools scaled to two replicas under load"):
                for name in ("pre", "dec"):
                    cluster.kubectl("scale", f"deployment/{PAIR}-{name}", f"--namespace={namespace}", "--replicas=2")
                eventually(lambda: models.ready_pods(cluster, namespace, PAIR, 4), seconds=120)
                eventually(lambda: expect_answers_of(asking, 2), seconds=120)
            old = set(models.pods(cluster, namespace, PAIR))
            with phases("a change of the spec under load → both pools replaced"):
                limits = '{"spec": {"engine": {"limits": {"maxNumSeqs": 9}}}}'
                cluster.kubectl("patch", models.KIND, PAIR, f"--namespace={namespace}", "--type=merge", f"--patch={limits}")
                eventually(lambda: expect_replaced(cluster, namespace, old), seconds=240)
        expect_no_loss(answers_of(asking), TOKENS)
        with phases("pairs of the new replicas"):
            eventually(lambda: expect_lent(0), seconds=120)


def expect_streams(asking: list[Client]) -> None:
    """Each client is being answered at this moment."""
    assert all(client.received > 2 for client in asking)


def expect_answered(asking: list[Client], since: float) -> None:
    """Each client has had a whole answer to something that it asked after that moment."""
    for client in asking:
        assert any(it.complete and it.started > since for it in list(client.answers))


def expect_answers_of(asking: list[Client], count: int) -> None:
    """So many replicas have answered them."""
    assert len({it.replica for client in asking for it in list(client.answers) if it.complete}) >= count


def expect_replaced(cluster: Cluster, namespace: str, old: set[str]) -> None:
    """Two replicas of each pool are ready, and none of the old ones is left."""
    assert not old & set(models.ready_pods(cluster, namespace, PAIR, 4))
