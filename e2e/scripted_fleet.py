"""Models whose replicas are scripted engines: what they say of their load, and what becomes of their number."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e import models, scripted_engine
from e2e.cluster.cluster import Cluster
from penstock.api import labels
from testing import patient

Object = dict[str, Any]
PENSTOCK = str(Path(sys.executable).parent / "penstock")
IDLE: Object = {"max_num_seqs": 8, "kv_blocks_total": 1000, "kv_blocks_reclaimable": 1000}
HALF: Object = IDLE | {"num_requests_running": 4, "kv_cache_usage_perc": 0.2, "kv_blocks_reclaimable": 800}
OVERLOAD: Object = IDLE | {
    "num_requests_running": 8,
    "num_requests_waiting": {"capacity": 40},
    "kv_cache_usage_perc": 0.3,
    "prefill_tokens_per_s": 4321.0,
}


def scripted(name: str, **scaling: Any) -> Object:
    """A model of one scaled pool of them."""
    pool = {"name": "cpu", "template": scripted_engine.template(), "scaling": scaling}
    return models.small(name, replicas=None, pools=[pool])


class Fleet:
    """One model of scripted engines."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    @property
    def status(self) -> Object:
        """What is said of its one pool; fails while nothing is."""
        pools = self.cluster.get(models.KIND, self.name, self.namespace)["status"].get("scaling", [])
        assert len(pools) == 1, "the autoscaler has said nothing so far"
        return pools[0]

    def ready(self, count: int) -> list[Object]:
        return list(models.ready_pods(self.cluster, self.namespace, self.name, count).values())

    def active(self) -> Object:
        return models.conditions(self.cluster, self.namespace, self.name)["ScalingActive"]

    def deployment(self) -> Object:
        (found,) = self.cluster.list("deployments", self.namespace, f"{labels.MODEL}={self.name}")
        return found

    def say(self, load: Object) -> None:
        """Of each of its replicas."""
        for pod in models.pods(self.cluster, self.namespace, self.name).values():
            url = f"http://{pod['status']['podIP']}:{scripted_engine.PORT}/load"
            patient.put(url, json=load, trust_env=False).raise_for_status()

    def patch(self, scaling: Object) -> None:
        path = [{"op": "replace", "path": f"/spec/pools/0/scaling/{field}", "value": value} for field, value in scaling.items()]
        there = f"--namespace={self.namespace}"
        self.cluster.kubectl("patch", models.KIND, self.name, there, "--type=json", f"--patch={json.dumps(path)}")

    def explain(self, *words: str) -> str:
        """What `penstock explain` prints."""
        command = [PENSTOCK, "explain", self.name, f"--namespace={self.namespace}", *words]
        kubeconfig = f"--kubeconfig={self.cluster.kubeconfig}"
        return subprocess.run([*command, kubeconfig], capture_output=True, text=True, check=True, timeout=60).stdout


def steadily(check: Callable[[], None], seconds: float) -> None:
    """It holds the whole time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        check()
        time.sleep(0.5)
