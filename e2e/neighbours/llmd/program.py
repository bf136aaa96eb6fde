"""How llm-d's endpoint picker is started without Kubernetes, by its file discovery."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

DEFAULT: Final[Mapping[str, Any]] = {
    "plugins": [{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}, {"type": "prefix-cache-scorer"}],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "queue-scorer", "weight": 2.0},
                {"pluginRef": "kv-cache-utilization-scorer", "weight": 2.0},
                {"pluginRef": "prefix-cache-scorer", "weight": 3.0},
            ],
        }
    ],
}
"""What it takes where it is given no configuration (`loadDefaultConfig`): it cannot be told of a discovery without one. Its
prefixes are approximate: of the prompt's bytes, and by where earlier requests went."""


class Endpoint(NamedTuple):
    """One of the pool."""

    name: str
    host: str
    port: int
    labels: Mapping[str, str]


class Ports(NamedTuple):
    """Where it serves."""

    grpc: int
    health: int
    metrics: int


def command(program: Path, folder: Path, pool: Sequence[Endpoint], config: Mapping[str, Any], ports: Ports) -> list[str]:
    """The command of a picker over `pool`.

    Args:
        program: The picker.
        folder: Gets its files.
        pool: Its endpoints.
        config: Without its discovery.
        ports: Where it is to serve.
    """
    file, settings = folder / "endpoints.yaml", folder / "llm-d.yaml"
    known = [{"name": it.name, "address": it.host, "port": str(it.port), "labels": dict(it.labels)} for it in pool]
    file.write_text(yaml.safe_dump({"endpoints": known}))
    discovery = {"type": "file-discovery", "parameters": {"path": str(file), "watchFile": True}}
    whole = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        **config,
        "plugins": [discovery, *config["plugins"]],
        "dataLayer": {"discovery": {"pluginRef": "file-discovery"}},
    }
    settings.write_text(yaml.safe_dump(whole))
    at = [f"--grpc-port={ports.grpc}", f"--grpc-health-port={ports.health}", f"--metrics-port={ports.metrics}"]
    quiet = ["--secure-serving=false", "--metrics-endpoint-auth=false", "--tracing=false", "--enable-pprof=false"]
    return [str(program), f"--config-file={settings}", "--pool-name=ours", *at, *quiet]
