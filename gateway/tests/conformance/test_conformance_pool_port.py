"""The port of an InferencePool, judged by the suite: what a foreign gateway sees of the picker."""

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import conformance_of_ours
import pytest

from penstock.api.fleet import Fleet, InferencePool, Model, Pool, open_id
from penstock.epp_conformance.cli import main
from testing.ports import free_ports

pytestmark = pytest.mark.slow

CHECKS = ("duplex-*", "buffered-*", "pick-*", "subset-*", "health-*", "envoy-picked", "envoy-original-dst")


@pytest.mark.req("RT-41")
def test_a_pools_port_keeps_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    made = conformance_of_ours.fleet
    (port,) = free_ports(1)
    model = open_id("ns", "vllm")

    def fleet(ports: Any) -> Fleet:
        replicas = [type(it)(**{**_fields(it), "pool": model, "events_port": 0, "replay_port": 0}) for it in made(ports).replicas]
        return Fleet(
            models=[Model(id=model, served_names=[], hold_timeout_s=1.0)],
            pools=[Pool(id=model, model=model)],
            replicas=replicas,
            inference_pools=[InferencePool(id="ns/vllm", models=[model], members=[it.id for it in replicas])],
        )

    monkeypatch.setattr(conformance_of_ours, "fleet", fleet)
    with conformance_of_ours.gateway(tmp_path, "--pool-port", f"ns/vllm={port}") as (_, endpoints):
        _until_listening(port)
        told = [flag for endpoint in endpoints for flag in ("--endpoint", endpoint)]
        only = [flag for name in CHECKS for flag in ("--only", name)]
        flags = ["--target", f"127.0.0.1:{port}", "--model", "tiny", "--serve-endpoints", "--at-once", "8"]
        status = main([*flags, *told, *only, "--skip", "subset-bodyless"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert " 0 fail, 0 not applicable" in said, said


def _fields(it: Any) -> dict[str, Any]:
    return {name: getattr(it, name) for name in it.__struct_fields__}


def _until_listening(port: int) -> None:
    """The gateway opens its pools' ports after it is ready."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
