"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler: their flags, their order, and when each is ready."""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from e2e.cluster import network
from e2e.cluster.pki import API_PORT, API_URL, Pki
from e2e.cluster.processes import Processes

ETCD = "http://127.0.0.1:2379"


class ControlPlane:
    """Called from inside the cluster's network namespace."""

    def __init__(self, state: Path, programs: Path, processes: Processes, pki: Pki) -> None:
        self.state, self.programs, self.processes, self.pki = state, programs, processes, pki

    def kill(self) -> None:
        """All four at once, as when the machine goes down."""
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            self.processes.stop(name, seconds=0)

    def start_etcd(self) -> None:
        command = [self.programs / "etcd", f"--data-dir={self.state / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn"]
        command += [f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}", "--listen-peer-urls=http://127.0.0.1:2380"]
        self.processes.start("etcd", command)
        self.processes.wait_until_ready("etcd", _answers(f"{ETCD}/health"))

    def start_api_server(self, more: Sequence[str] = ()) -> None:
        """The flags are kubeadm's where they matter to clients: RBAC and Node authorization, NodeRestriction, bound tokens; and
        `more` of them."""
        pki = self.pki.folder
        command = [
            self.programs / "kube-apiserver",
            f"--etcd-servers={ETCD}",
            "--bind-address=0.0.0.0",
            f"--secure-port={API_PORT}",
            f"--advertise-address={network.GATEWAY}",
            f"--service-cluster-ip-range={network.SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--profiling=false",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/service-account.pub",
            f"--service-account-signing-key-file={pki}/service-account.key",
            f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
            f"--proxy-client-key-file={pki}/front-proxy-client.key",
            *more,
        ]
        self.processes.start("kube-apiserver", command)
        trust = ssl.create_default_context(cafile=pki / "ca.crt")
        self.processes.wait_until_ready("kube-apiserver", _answers(f"{API_URL}/readyz", trust), seconds=120)

    def start_controllers(self) -> None:
        pki, kubeconfig = self.pki.folder, self.pki.kubeconfig("kube-controller-manager")
        command = [
            self.programs / "kube-controller-manager",
            *_component_flags(kubeconfig, 10257),
            "--use-service-account-credentials=true",
            "--kube-api-qps=500",  # the default of 20 alone makes the start 5 s slower
            "--kube-api-burst=1000",
            f"--root-ca-file={pki}/ca.crt",
            f"--service-account-private-key-file={pki}/service-account.key",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            "--allocate-node-cidrs=true",
            f"--cluster-cidr={network.POD_CIDR}",
            "--horizontal-pod-autoscaler-sync-period=2s",  # between its looks, where 15 s are usual
            "--node-monitor-grace-period=20s",  # until a silent node is not ready: four missed heartbeats, where 50 s are usual
        ]
        self.processes.start("kube-controller-manager", command)
        scheduler = [self.programs / "kube-scheduler", *_component_flags(self.pki.kubeconfig("kube-scheduler"), 10259)]
        self.processes.start("kube-scheduler", scheduler)
        self.processes.wait_until_ready("kube-scheduler", _answers("https://127.0.0.1:10259/readyz", verify=False))
        # Pods cannot be made in a namespace before its default service account exists.
        trust = ssl.create_default_context(cafile=pki / "ca.crt")
        trust.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        account = f"{API_URL}/api/v1/namespaces/default/serviceaccounts/default"
        self.processes.wait_until_ready("kube-controller-manager", _answers(account, trust))


def _component_flags(kubeconfig: Path, port: int) -> list[str]:
    who = [f"{flag}={kubeconfig}" for flag in ("--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig")]
    return ["--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={port}", *who]


def _answers(url: str, verify: ssl.SSLContext | bool = True) -> Callable[[], bool]:
    """A check whether that URL answers with 200."""

    def check() -> bool:
        try:
            return httpx.get(url, verify=verify, trust_env=False, timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    return check
