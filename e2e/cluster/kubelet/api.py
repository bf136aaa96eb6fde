"""The API server, as JSON over HTTPS."""

import http.client
import json
import ssl
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Object = dict[str, Any]  # a Kubernetes object, or a part of one, as its JSON says

# What a request may raise besides ApiError when the server is away.
CONNECTION_ERRORS = (OSError, http.client.HTTPException)


class ApiError(Exception):
    """The API server refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def timestamp() -> str:
    """Now, as Kubernetes' Time."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp() -> str:
    """Now, as Kubernetes' MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Api:
    """One connection a request. Not a library's client: a node then takes 25 MiB and starts in 0.1 s."""

    def __init__(self, kubeconfig: Path) -> None:
        """`kubeconfig` is in JSON and holds paths to a client certificate."""
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        url = urllib.parse.urlsplit(cluster["server"])
        assert url.hostname and url.port, "a server without host and port"
        self.host, self.port = url.hostname, url.port
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._tls.load_cert_chain(user["client-certificate"], user["client-key"])

    def open(
        self, method: str, path: str, body: Object | None = None, content: str = "application/json", timeout: float = 20
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection(self.host, self.port, context=self._tls, timeout=timeout)
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": content})
        return connection.getresponse()

    def get(self, path: str) -> Object:
        return self._ask("GET", path)

    def post(self, path: str, body: Object) -> Object:
        return self._ask("POST", path, body)

    def delete(self, path: str, options: Object) -> Object:
        return self._ask("DELETE", path, options)

    def patch(self, path: str, body: Object, kind: str = "strategic-merge-patch") -> Object:
        return self._ask("PATCH", path, body, f"application/{kind}+json")

    def _ask(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> Object:
        with self.open(method, path, body, content) as response:
            answer = json.loads(response.read() or b"{}")
        if response.status >= 400:
            raise ApiError(response.status, answer.get("message", ""))
        return answer
