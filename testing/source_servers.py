"""A Hub and a bucket: real HTTP servers that speak as much of the two protocols as downloads need."""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FileServer:
    """Files by path, and what tests bend."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.served: dict[str, bytes] = {}
        """What is sent in place of a file's content."""
        self.status: dict[str, int] = {}
        """By path, or "" for the listing: what is answered instead."""
        self.status_of_all: int | None = None
        """What is answered to everything instead."""
        self.delay_s = 0.0
        """Before each answer."""
        self.ranges: list[tuple[str, int]] = []
        """(path, start) of each read."""
        self.break_after = 10**9
        """So many reads are answered; the others fail."""
        self.headers: dict[str, str] = {}
        self.host, self.port = "127.0.0.1", 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def listing(self, handler: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError

    def path_of(self, path: str) -> str | None:
        """The file that a URL's path names; None: it asks for the listing."""
        raise NotImplementedError

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name = self.path_of(unquote(urlsplit(handler.path).path))
        time.sleep(self.delay_s)
        if self.status_of_all is not None:
            reply(handler, self.status_of_all, b"refused")
        elif (status := self.status.get(name or "")) is not None:
            reply(handler, status, b"refused")
        elif name is None:
            self.listing(handler)
        elif name not in self.files:
            reply(handler, 404, b"")
        else:
            self.send(handler, name)

    def store(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers a PUT or a DELETE."""
        data = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        name = self.path_of(unquote(urlsplit(handler.path).path))
        if self.status_of_all is not None or name is None:
            reply(handler, self.status_of_all or 400, b"refused")
        elif handler.command == "DELETE":
            self.files.pop(name, None)
            reply(handler, 204, b"")
        else:
            self.files[name] = data
            reply(handler, 200, b"", {"ETag": etag(data)})

    def send(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        data = self.served.get(name, self.files[name])
        headers = {"ETag": etag(self.files[name]), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **self.headers}
        span = handler.headers.get("Range")
        if span is None:
            reply(handler, 200, data, headers)
            return
        start, end = (int(it) for it in span.removeprefix("bytes=").split("-"))
        self.ranges.append((name, start))
        if len(self.ranges) > self.break_after:
            reply(handler, 400, b"broken")
            return
        headers["Content-Range"] = f"bytes {start}-{min(end, len(data) - 1)}/{len(data)}"
        reply(handler, 206, data[start : end + 1], headers)


class HubServer(FileServer):
    """`org/name` on the Hub, with one branch."""

    def path_of(self, path: str) -> str | None:
        parts = path.split("/resolve/")
        return parts[1].partition("/")[2] if len(parts) == 2 else None

    def listing(self, handler: BaseHTTPRequestHandler) -> None:
        siblings: list[dict[str, Any]] = []
        for path, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob(data)}
            if path.endswith(".safetensors"):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        body = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0, "likes": 0}
        reply(handler, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})


class BucketServer(FileServer):
    """The bucket `b`, by path."""

    def path_of(self, path: str) -> str | None:
        return path.removeprefix("/b/") if path.startswith("/b/") and len(path) > 3 else None

    def listing(self, handler: BaseHTTPRequestHandler) -> None:
        prefix = parse_qs(urlsplit(handler.path).query).get("prefix", [""])[0]
        now = datetime(2026, 1, 1, tzinfo=UTC).isoformat()
        entries = "".join(
            f"<Contents><Key>{path}</Key><Size>{len(data)}</Size><LastModified>{now}</LastModified><ETag>{etag(data)}</ETag></Contents>"
            for path, data in sorted(self.files.items())
            if path.startswith(prefix)
        )
        body = (
            f'<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>'
        )
        reply(handler, 200, body.encode(), {"Content-Type": "application/xml"})


def blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that tests kill
            super().handle_error(request, client_address)


@contextmanager
def running(server: FileServer, host: str = "127.0.0.1") -> Iterator[None]:
    """It answers meanwhile, at that address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.answer(self)

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            server.store(self)

        do_DELETE = do_PUT

        def log_message(self, format: str, *args: Any) -> None:
            return

    with _Server((host, 0), Handler) as listening:
        server.host, server.port = host, listening.server_port
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            listening.shutdown()
            thread.join()
