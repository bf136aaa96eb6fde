"""A replica that runs no model and says of its load what a test has told it: `PUT /load`, the next `GET /load` gives it back.

What the autoscaler does about loads that a real engine comes to only now and then is shown with it. It is ready as soon as it has
started, publishes no events, and answers no completions.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT = 8000


def template() -> dict[str, Any]:
    """What makes a pool's replicas such engines."""
    return {"spec": {"containers": [{"name": "engine", "command": [sys.executable, str(Path(__file__).resolve())]}]}}


class Server(ThreadingHTTPServer):
    """Keeps what `/load` says."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, PORT), Handler)
        self.load: dict[str, Any] = {}
        self._epoch, self._seq = int(time.time() * 1000), 0

    def report(self) -> bytes:
        """A load report, newer than all before."""
        self._seq += 1
        return json.dumps({"type": "LoadReport", "epoch": self._epoch, "seq": self._seq, **self.load}).encode()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """The probes' paths and `/load`; nothing else is there."""
        known = dict.fromkeys(("/ready", "/live", "/health"), b"{}")
        body = self._server.report() if self.path == "/load" else known.get(self.path)
        self._answer(404 if body is None else 200, body or b"{}")

    def do_PUT(self) -> None:
        """`/load`: the fields of a report, without epoch and number."""
        self._server.load = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._answer(200, b"{}")

    @property
    def _server(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The looks of gateways are many, and tell nothing."""


if __name__ == "__main__":
    Server(os.environ["POD_IP"]).serve_forever()
