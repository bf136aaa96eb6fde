"""Whatever happens to a model, its pods and its children: what the operator is woken for leaves a status that is about the
present, and Ready is never said of a model that nothing serves."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World

from penstock.operator.pods import is_ready
from penstock.operator.store import Key

KEY = Key("InferenceModel", "default", "tiny")
SPECS = st.fixed_dictionaries(
    {"served": st.sampled_from([{"name": "taken"}, {"name": "tiny"}])},
    optional={
        "replicas": st.integers(0, 3),
        "rollout": st.fixed_dictionaries({"paused": st.booleans()}),
        "engine": st.sampled_from([{"limits": {"maxNumSeqs": 8}}, {"quantization": {"weights": "fp8"}}]),
        "pools": st.sampled_from(
            [
                [{"name": "main"}, {"name": "extra"}],
                [{"name": "main", "template": {"spec": {"hostPID": True}}}],
                [{"name": "main", "scaling": {"min": 1, "max": 3}}],
            ]
        ),
    },
)
PODS = st.tuples(
    st.sampled_from(["young", "ready", "crashed", "leaving", "gone"]),
    st.integers(0, 2),
    st.sampled_from(["main", "extra"]),
    st.booleans(),
)
"""What becomes of a pod, which one, of which pool; and whether it is of the revision that is wanted."""
STEPS = st.one_of(
    st.tuples(st.just("spec"), SPECS),
    st.tuples(st.just("pod"), PODS),
    st.tuples(st.just("size"), st.integers(0, 3)),
    st.tuples(st.just("rival"), st.booleans()),
    st.tuples(st.just("lost"), st.sampled_from(["Service", "Deployment", "NetworkPolicy"])),
)


class Cluster:
    """A model, and what may happen to it."""

    def __init__(self, world: World) -> None:
        self.world, self.make = world, world.make
        self.step: dict[str, Any] = {
            "spec": self.spec, "pod": self.pod, "size": self.size, "rival": self.rival, "lost": self.lost,
        }  # fmt: skip

    async def spec(self, changes: Any) -> None:
        """The user writes another spec."""
        await self.world.apply(self.make.resource(**changes))

    async def pod(self, what: Any) -> None:
        """A kubelet, or a controller, does something to a pod."""
        state, number, pool, current = what
        name = f"tiny-{pool}-{number}"
        live = self.world.api.objects.get(("Pod", "default", name))
        if state == "gone":
            if live is not None:
                await self.world.api.delete(live)
            return
        workload = self.world.api.objects.get(("Deployment", "default", f"tiny-{pool}"))
        if workload is None and live is None:
            return
        wanted = workload["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"] if workload else "gone"
        revision = live["metadata"]["labels"]["penstock.dev/revision"] if live else wanted if current else "older"
        kind = {"ready": self.make.ready_pod, "leaving": self.make.ready_pod, "crashed": self.make.crashed_pod}
        pod = kind.get(state, self.make.pod)(name, pool=pool, revision=revision)
        if state == "leaving":
            pod["metadata"]["deletionTimestamp"] = "2026-02-01T00:00:00Z"
        self.world.api.put(pod)

    async def size(self, replicas: int) -> None:
        """Somebody scales the workload."""
        workload = self.world.api.objects.get(("Deployment", "default", "tiny-main"))
        if workload is not None:
            self.world.api.put({**workload, "spec": {**workload["spec"], "replicas": replicas}})

    async def rival(self, there: bool) -> None:
        """An older model claims the name `taken`, or goes."""
        key = ("InferenceModel", "default", "rival")
        if there:
            older = self.make.resource("rival", served={"name": "taken"})
            older["metadata"]["creationTimestamp"] = "2025-01-01T00:00:00Z"
            await self.world.apply(older)
        elif key in self.world.api.objects:
            resource = self.world.api.objects.pop(key)
            self.world.watch.heard("DELETED", resource)

    async def lost(self, kind: str) -> None:
        """Somebody deletes a child."""
        live = self.world.api.objects.get((kind, "default", "tiny-main"))
        if live is not None:
            await self.world.api.delete(live)

    async def rest(self) -> None:
        """Handles what the operator was woken for, and nothing else."""
        for _ in range(40):
            if not self.world.queued:
                return
            await self.world.reconciler.reconcile(self.world.queued.pop(0))
        raise AssertionError("does not come to rest")

    def look(self) -> None:
        """Compares the status with what there is."""
        model = self.world.live("InferenceModel")
        status = model["status"]
        pods = [it for (kind, _, _), it in self.world.api.objects.items() if kind == "Pod"]
        objects = self.world.api.objects.items()
        workloads = {name: it for (kind, _, name), it in objects if kind == "Deployment" and name.startswith("tiny-")}
        conditions = {it["type"]: it for it in status["conditions"]}
        about = {it["observedGeneration"] for it in (status, *status["conditions"])}
        assert about == {model["metadata"]["generation"]}
        told = {pool["name"]: pool["ready"] for pool in status["pools"]}
        assert set(told) == {name.removeprefix("tiny-") for name in workloads}
        for pool, ready in told.items():
            serving = sum(is_ready(it) for it in pods if it["metadata"]["labels"]["penstock.dev/pool"] == pool)
            assert ready == f"{serving}/{workloads[f'tiny-{pool}']['spec'].get('replicas', 1)}"
        refused = "quantization" in str(model["spec"]) or "hostPID" in str(model["spec"]) or _contradicts(model["spec"])
        assert (conditions["Accepted"]["status"] == "False") is refused, conditions["Accepted"]["message"]
        rival = ("InferenceModel", "default", "rival") in self.world.api.objects
        lost = model["spec"]["served"]["name"] == "taken" and rival
        assert (conditions["Routed"]["reason"] == "NameConflict") is (lost and conditions["Routed"]["status"] == "False")
        if conditions["Ready"]["status"] == "True":
            assert not refused and not lost
            for name, workload in workloads.items():
                assert workload["spec"].get("replicas", 1) == 0 or _serves(name, workload, pods)
        if not refused and lost:
            assert conditions["Ready"]["reason"] == "NameConflict"


def _contradicts(spec: Any) -> bool:
    """One pool and no scaling are what `replicas` is for."""
    return "replicas" in spec and (len(spec["pools"]) > 1 or "scaling" in spec["pools"][0])


def _serves(name: str, workload: Any, pods: list[Any]) -> bool:
    revision = workload["spec"]["template"]["metadata"]["labels"]["penstock.dev/revision"]
    return any(
        is_ready(it) and it["metadata"]["name"].startswith(name) and it["metadata"]["labels"]["penstock.dev/revision"] == revision
        for it in pods
    )


async def _happens(world: World, steps: list[tuple[str, Any]]) -> None:
    cluster = Cluster(world)
    await cluster.spec({})
    await cluster.rest()
    cluster.look()
    for kind, what in steps:
        done: Awaitable[None] = cluster.step[kind](what)
        await done
        await cluster.rest()
        cluster.look()


@pytest.mark.req("XC-03")
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=8))
def test_a_status_is_about_the_present_whatever_happens(new_world: Callable[[], World], steps: list[tuple[str, Any]]) -> None:
    asyncio.run(_happens(new_world(), steps))
