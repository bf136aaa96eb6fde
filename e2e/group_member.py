"""A pod of a replica that spans nodes and runs no model: engines cannot span nodes yet.

As in any such engine, the leader is ready only once every worker has found it, at the address that LWS gives them, and a worker
ends when its leader has gone.
"""

import os
import select
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT, MEETING = 8000, 29_500
LWS = "leaderworkerset.sigs.k8s.io"


def template() -> dict[str, Any]:
    """What makes a pool's pods such members, no two of a group on the same node."""
    members = {"matchExpressions": [{"key": f"{LWS}/name", "operator": "Exists"}]}
    apart = [{"labelSelector": members, "matchLabelKeys": [f"{LWS}/group-key"], "topologyKey": "kubernetes.io/hostname"}]
    engine = {"name": "engine", "command": [sys.executable, str(Path(__file__).resolve())]}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}
    return {"spec": {"containers": [engine], "affinity": affinity}}


class Leader(ThreadingHTTPServer):
    """Answers the probes."""

    daemon_threads = True

    def __init__(self, host: str, workers: int) -> None:
        super().__init__((host, PORT), Handler)
        self._meeting = socket.create_server((host, MEETING))
        self._workers: list[socket.socket] = []
        self._wanted = workers

    def service_actions(self) -> None:
        """Between requests: takes in the workers that have come."""
        while select.select([self._meeting], [], [], 0)[0]:
            self._workers.append(self._meeting.accept()[0])

    @property
    def complete(self) -> bool:
        """Whether all workers are there."""
        return len(self._workers) == self._wanted


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """The probes' paths."""
        assert isinstance(self.server, Leader)
        ready = self.path in ("/live", "/health") or (self.path == "/ready" and self.server.complete)
        self.send_response(200 if ready else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """The looks of gateways are many, and tell nothing."""


def work(leader: str) -> None:
    """Joins the leader, and stays until it goes."""
    while True:
        try:
            meeting = socket.create_connection((leader, MEETING), timeout=2)
            break
        except OSError as problem:  # it has no name or no port yet
            sys.stderr.write(f"{leader}: {problem}\n")
            time.sleep(0.2)
    meeting.settimeout(None)
    meeting.recv(1)
    sys.exit(f"{leader} has gone")


if __name__ == "__main__":
    if os.environ["LWS_WORKER_INDEX"] == "0":
        Leader(os.environ["POD_IP"], int(os.environ["LWS_GROUP_SIZE"]) - 1).serve_forever(poll_interval=0.1)
    work(os.environ["LWS_LEADER_ADDRESS"])
