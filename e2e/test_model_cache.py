"""Models that a Job brings to a claim: once, from where a killed one stopped, and never with a replica waiting for it."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.cluster import network
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually
from penstock.api import labels
from penstock.operator.fetching import RESULT
from testing.source_servers import BucketServer, reply, running

Object = dict[str, Any]
FREE = 5
"""Parts that a bucket gives before it is to be opened."""
# The model is small; with this it is nine parts, of which eight are asked for at once.
BALLAST = {"ballast.json": os.urandom(64 << 20)}


class Bucket(BucketServer):
    """`s3://b/team/m`: the demo model. Until it is opened, a few parts are answered and the others held."""

    def __init__(self) -> None:
        files = {path.name: path.read_bytes() for path in models.DEMO_MODEL.iterdir()} | BALLAST
        super().__init__({f"team/m/{name}": data for name, data in files.items()})
        self.sent: list[tuple[str, str]] = []
        """(path, range) of each part that was answered."""
        self.opened = threading.Event()
        self._lock = threading.Lock()

    def send(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        with self._lock:
            held = not self.opened.is_set() and len(self.sent) >= FREE
            if not held:
                self.sent.append((name, handler.headers["Range"]))
        if held:
            self.opened.wait(120)
            reply(handler, 503, b"who asked may be dead by now")
        else:
            super().send(handler, name)


def claim(name: str, folder: Path) -> list[Object]:
    """A volume that is the folder, and a claim that it is bound to."""
    folder.mkdir()
    room = {"storage": "1Gi"}
    common = {"storageClassName": "", "accessModes": ["ReadWriteMany"]}
    volume = {"capacity": room, "hostPath": {"path": str(folder)}, "persistentVolumeReclaimPolicy": "Retain", **common}
    wanted = {"resources": {"requests": room}, "volumeName": f"penstock-e2e-{name}", **common}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": wanted["volumeName"]}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": wanted},
    ]


def secret(name: str, bucket: BucketServer) -> Object:
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "sesame", "AWS_REGION": "r", "AWS_ENDPOINT_URL": bucket.url}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": keys}


def cached(name: str, volume: str, credentials: str, replicas: int = 0, uri: str = "s3://b/team/m") -> Object:
    source = {"uri": uri, "secretRef": {"name": credentials}, "cache": {"type": "PVC", "claimName": volume}}
    return models.small(name, source=source, replicas=replicas)


@contextmanager
def serving(*buckets: Bucket) -> Iterator[None]:
    """Pods reach them meanwhile."""
    with ExitStack() as stack:
        for bucket in buckets:
            stack.enter_context(running(bucket, network.GATEWAY))
            stack.callback(bucket.opened.set)
        yield


def fetch_pods(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    return cluster.list("pods", namespace, f"{labels.FETCH_OF}={name}")


def expect_available(cluster: Cluster, namespace: str, name: str, status: str, reason: str, words: str = "") -> None:
    found = models.conditions(cluster, namespace, name)["ModelAvailable"]
    assert (found["status"], found["reason"]) == (status, reason), found
    assert words in found["message"], found


def expect_fetched(cluster: Cluster, namespace: str, name: str) -> None:
    jobs = cluster.list("jobs", namespace, f"{labels.MODEL}={name}")
    assert len(jobs) == 1, f"{len(jobs)} Jobs"
    assert RESULT in jobs[0]["metadata"]["annotations"]
    expect_available(cluster, namespace, name, "Unknown", "NotLoadedYet")


def end_midway(cluster: Cluster, namespace: str, name: str, bucket: Bucket, *, at_once: bool) -> str:
    """Ends the Job's process when so many parts are there, by SIGKILL or by deleting its pod; returns the pod's UID."""

    def expect_progress() -> None:
        assert len(bucket.sent) == FREE
        expect_available(cluster, namespace, name, "Unknown", "Downloading", "% of 0.07 GiB")

    eventually(expect_progress, seconds=120)
    (pod,) = fetch_pods(cluster, namespace, name)
    if at_once:
        (status,) = pod["status"]["containerStatuses"]
        os.kill(int(status["containerID"].removeprefix("process://")), signal.SIGKILL)
    else:
        cluster.kubectl("delete", "pod", pod["metadata"]["name"], f"--namespace={namespace}", "--wait=false")
    bucket.opened.set()
    return pod["metadata"]["uid"]


@pytest.mark.req("LD-14")
def test_a_model_comes_once_goes_on_after_a_kill_and_replicas_start_from_the_claim(
    system: System, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    cluster, killed, evicted, closed = system.cluster, Bucket(), Bucket(), Bucket()
    closed.status[""] = 401
    wanted = {
        "killed": cached("killed", "one", "killed", replicas=1),
        "evicted": cached("evicted", "two", "evicted"),
        "refused": cached("refused", "two", "closed"),
        "missing": cached("missing", "two", "evicted", uri="s3://b/nowhere/m"),
        "again": cached("again", "one", "killed"),
    }
    with serving(killed, evicted, closed), ExitStack() as stack:
        volumes = [*claim("one", tmp_path / "one"), *claim("two", tmp_path / "two")]
        secrets = [secret("killed", killed), secret("evicted", evicted), secret("closed", closed)]
        stack.callback(cluster.kubectl, "delete", "pv", "penstock-e2e-one", "penstock-e2e-two", "--wait=false")
        cluster.apply(*volumes, *secrets, namespace=namespace)
        for name in ("killed", "evicted", "refused", "missing"):
            stack.enter_context(models.applied(cluster, namespace, wanted[name]))

        with phases("401 and 404 → conditions that say so"):
            told = (namespace, "refused", "False", "SourceUnauthorized", "(credentials: Secret closed)")
            eventually(lambda: expect_available(cluster, *told), seconds=120)
            eventually(lambda: expect_available(cluster, namespace, "missing", "False", "SourceNotFound"), seconds=120)
            assert [len(fetch_pods(cluster, namespace, name)) for name in ("refused", "missing")] == [1, 1], "no second try"
        with phases("progress told, then both Jobs' processes ended midway"):
            uid = end_midway(cluster, namespace, "killed", killed, at_once=True)
            end_midway(cluster, namespace, "evicted", evicted, at_once=False)
            assert not models.pods(cluster, namespace, "killed"), "no replica waits for a download"
        with phases("the evicted one gone on with"):
            eventually(lambda: expect_fetched(cluster, namespace, "evicted"), seconds=120)
        with phases("the killed one gone on with, and its replica ready"):
            models.wait_until_ready(cluster, namespace, "killed", seconds=120)
        for bucket in (killed, evicted):
            assert len(bucket.sent) == 9 and max(Counter(bucket.sent).values()) == 1, "no part came twice"
        assert uid not in {pod["metadata"]["uid"] for pod in fetch_pods(cluster, namespace, "killed") if _done(pod)}
        (replica,) = models.ready_pods(cluster, namespace, "killed", 1).values()
        (engine,) = replica["spec"]["containers"]
        (folder,) = [it for it in (tmp_path / "one").iterdir() if it.name != ".penstock"]
        assert engine["args"][0] == f"/penstock/models/{folder.name}"
        assert not [variable for variable in engine["env"] if variable["name"].startswith("AWS_")]

        with phases("another model of the same source and claim: nothing to bring"):
            stack.enter_context(models.applied(cluster, namespace, wanted["again"]))
            eventually(lambda: expect_fetched(cluster, namespace, "again"), seconds=120)
        assert len(killed.sent) == 9


def _done(pod: Object) -> bool:
    return pod["status"].get("phase") == "Succeeded"
