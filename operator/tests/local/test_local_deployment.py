"""Pods as processes: a Deployment's life on this machine, with small HTTP servers for engines."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.operator.local import network
from penstock.operator.local.deployment import LocalDeployment
from penstock.operator.local.pod import Phase, Pod
from penstock.operator.local.process import Service, spawn, terminate

SERVER = """
import http.server, os, signal, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
print("drained")
"""


def manifest(replicas: int = 1, script: str = SERVER, mark: str = "a") -> dict[str, Any]:
    container = {
        "name": "engine",
        "command": [sys.executable, "-c", script, "$(POD_IP)", mark],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}},
    }
    template = {"metadata": {"labels": {}}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 5}}
    return {"metadata": {"name": "m-p"}, "spec": {"replicas": replicas, "template": template}}


async def until(deployment: LocalDeployment, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            deployment.step()
            await asyncio.sleep(0.05)


def pids(deployment: LocalDeployment) -> list[int]:
    return [pod._process.pid for pod in deployment.pods if pod._process is not None]


@pytest.mark.parametrize("port", [8000, 9002, 9090])
def test_an_address_that_an_engine_or_a_gateway_of_another_system_uses_is_skipped(port: int) -> None:
    first = next(network.addresses())
    with socket.create_server((first, port)):
        assert next(network.addresses()) != first


async def test_pods_become_ready_each_at_its_own_address_and_go_with_grace(tmp_path: Path) -> None:
    deployment = LocalDeployment(manifest(2), network.addresses(), tmp_path)
    try:
        await until(deployment, lambda: deployment.ready == 2)
        assert len({pod.address for pod in deployment.pods}) == 2
        pods, processes = list(deployment.pods), pids(deployment)
    finally:
        await deployment.close()
    assert all("drained" in pod.log.read_text() for pod in pods)
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_killed_pod_comes_back(tmp_path: Path) -> None:
    deployment = LocalDeployment(manifest(1), network.addresses(), tmp_path)
    try:
        await until(deployment, lambda: deployment.ready == 1)
        pod = deployment.pods[0]
        os.kill(pids(deployment)[0], signal.SIGKILL)
        await until(deployment, lambda: pod.phase is Phase.CRASHED)
        assert pod.message == "killed by SIGKILL"
        await until(deployment, lambda: deployment.ready == 1)
        assert (pod.restarts, deployment.pods) == (1, [pod])
    finally:
        await deployment.close()


async def test_scaling_in_takes_the_victim(tmp_path: Path) -> None:
    deployment = LocalDeployment(manifest(2), network.addresses(), tmp_path)
    try:
        await until(deployment, lambda: deployment.ready == 2)
        stays, goes = deployment.pods
        deployment.scale(1, [goes.uid])
        assert deployment.pods == [stays]
        assert list(deployment.leaving) == [goes] and goes.cordoned
        await until(deployment, lambda: not deployment.leaving)
        assert stays.phase is Phase.READY
    finally:
        await deployment.close()


async def test_a_victim_is_spared_once_nobody_is_to_go(tmp_path: Path) -> None:
    deployment = LocalDeployment(manifest(2), network.addresses(), tmp_path)
    try:
        deployment.step()
        victim = deployment.pods[0]
        victim.cordoned, deployment.replicas = True, 1
        deployment.spare()
        assert victim.cordoned
        deployment.replicas = 2
        deployment.spare()
        assert not victim.cordoned
    finally:
        await deployment.close()


async def test_a_new_template_replaces_pods_without_a_gap(tmp_path: Path) -> None:
    deployment = LocalDeployment(manifest(2), network.addresses(), tmp_path)
    try:
        await until(deployment, lambda: deployment.ready == 2)
        before = set(deployment.pods)
        deployment.manifest = manifest(2, mark="b")
        least = 2

        def replaced() -> bool:
            nonlocal least
            least = min(least, deployment.ready)
            return deployment.ready == 2 and not before & set(deployment.pods)

        await until(deployment, replaced)
        assert least == 2
    finally:
        await deployment.close()


async def test_a_template_that_crashes_leaves_the_old_pods_serving_and_says_why(tmp_path: Path) -> None:
    deployment = LocalDeployment(manifest(1), network.addresses(), tmp_path)
    try:
        await until(deployment, lambda: deployment.ready == 1)
        old = deployment.pods[0]
        deployment.manifest = manifest(1, script="raise SystemExit('no such model')")
        await until(deployment, lambda: any(pod.phase is Phase.CRASHED for pod in deployment.pods))
        crashed = next(pod for pod in deployment.pods if pod.phase is Phase.CRASHED)
        assert crashed.message == "exit status 1: no such model"
        assert old in deployment.pods and old.phase is Phase.READY
    finally:
        await deployment.close()


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    script = "trap '' TERM; sleep 60 & echo $!; wait; wait"
    log = tmp_path / "log"
    process = await spawn(["sh", "-c", script], log)
    async with asyncio.timeout(60):
        while not log.read_text().strip():
            await asyncio.sleep(0.02)
    child = int(log.read_text())
    await terminate(process, grace_s=0.3)
    assert process.returncode == -signal.SIGKILL
    async with asyncio.timeout(30):  # less than the minute after which it ends by itself
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            await asyncio.sleep(0.02)


def test_what_has_no_meaning_here_is_refused_by_name(tmp_path: Path) -> None:
    template = manifest()["spec"]["template"]
    template["spec"]["containers"][0]["env"].append({"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}})
    with pytest.raises(ValueError, match="env KEY"):
        Pod("m-p-1", "127.0.0.1", template, "h", tmp_path / "log").command()


async def test_a_template_that_names_no_program_is_a_crash_that_says_so(tmp_path: Path) -> None:
    missing = manifest(1)
    missing["spec"]["template"]["spec"]["containers"][0]["command"] = ["no-such-program"]
    deployment = LocalDeployment(missing, network.addresses(), tmp_path)
    try:
        await until(deployment, lambda: deployment.pods[:1] != [] and deployment.pods[0].phase is Phase.CRASHED)
        assert "no-such-program" in deployment.pods[0].message
    finally:
        await deployment.close()


async def test_what_a_crashed_pod_had_started_goes_with_it(tmp_path: Path) -> None:
    script = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid); raise SystemExit(1)"
    deployment = LocalDeployment(manifest(1, script=script), network.addresses(), tmp_path)
    try:
        await until(deployment, lambda: deployment.pods[:1] != [] and deployment.pods[0].phase is Phase.CRASHED)
        child = Path(f"/proc/{deployment.pods[0].log.read_text().split()[0]}")
        await until(deployment, lambda: not child.exists() or "(sleep) Z" in (child / "stat").read_text())
    finally:
        await deployment.close()


async def test_a_pod_that_drains_can_be_ended_at_once(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('drains', flush=True)); print('up', flush=True)"
    stubborn = manifest(1, script=f"{script}\nwhile True: time.sleep(1)")
    stubborn["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 60
    deployment = LocalDeployment(stubborn, network.addresses(), tmp_path)
    deployment.step()
    pod = deployment.pods[0]
    await until(deployment, lambda: pod.log.exists() and "up" in pod.log.read_text())
    closing = asyncio.create_task(deployment.close())
    async with asyncio.timeout(60):
        while "drains" not in pod.log.read_text():
            await asyncio.sleep(0.05)
        pod.kill()
        await closing


async def test_a_service_that_ended_is_started_again_and_says_why_it_was_away(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    service = Service("gateway", ["sh", "-c", "echo came; sleep 60; echo went"], log)
    service.start()
    try:
        async with asyncio.timeout(60):
            while not log.read_text():
                await asyncio.sleep(0.02)
            first = service.pid
            assert first is not None and service.message == ""
            os.killpg(first, signal.SIGKILL)
            while not service.message:
                await asyncio.sleep(0.02)
            assert service.message == "killed by SIGKILL"
            while service.message:
                await asyncio.sleep(0.02)
        assert (service.restarts, service.pid != first) == (1, True)
    finally:
        await service.stop(1.0)
