"""The cluster's DNS: CoreDNS on the bridge's address, which every pod has as its name server."""

import httpx

from e2e.cluster.build import programs_folder
from e2e.cluster.pki import Pki
from e2e.cluster.processes import Processes

DOMAIN = "cluster.local"
COREFILE = """\
.:53 {
    errors
    ready 127.0.0.1:8181
    kubernetes %s {
        kubeconfig %s
    }
}
"""


def start_dns(processes: Processes, pki: Pki) -> None:
    """Called from inside the cluster's network namespace, when the API server is up."""
    corefile = pki.state / "Corefile"
    corefile.write_text(COREFILE % (DOMAIN, pki.kubeconfig("coredns")))
    processes.start("coredns", [programs_folder() / "coredns", "-conf", str(corefile)])
    processes.wait_until_ready("coredns", _is_ready)


def _is_ready() -> bool:
    try:
        return httpx.get("http://127.0.0.1:8181/ready", trust_env=False, timeout=2).is_success
    except httpx.TransportError:
        return False
