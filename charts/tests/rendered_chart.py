"""The chart, and the ways in which it is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "penstock"
Object = dict[str, Any]
Render = Callable[..., list[Object]]

DIGEST = "sha256:" + "0123456789abcdef" * 4
MODES: dict[str, Object] = {
    "default": {},
    "namespaced": {"watchNamespaces": ["team-a", "team-b"], "crds": {"install": False}},
    "mirror": {
        "image": {"registry": "registry.example.com/mirror/"},
        "imagePullSecrets": [{"name": "mirror"}],
        "operator": {"image": {"digest": DIGEST}, "engineImage": {"digest": DIGEST}},
        "gateway": {"image": {"digest": DIGEST}},
    },
    "closed": {
        "gateway": {
            "tls": {"secretName": "gateway-tls"},
            "replicaTls": {"secretName": "replica-tls", "name": "replica.example.com"},
            "tenants": {"secretName": "tenants"},
            "replicaCount": 3,
        },
        "envoy": {"tls": {"secretName": "listener-tls"}, "service": {"type": "LoadBalancer", "port": 443}},
        "networkPolicy": {"enabled": True, "clients": [{"podSelector": {"matchLabels": {"client": "yes"}}}]},
        "monitoring": {"enabled": True},
    },
    "bare": {
        "crds": {"install": False},
        "rbac": {"create": False},
        "operator": {"serviceAccount": {"create": False}, "podDisruptionBudget": {"enabled": False}},
    },
}
"""Values by what they are for."""
