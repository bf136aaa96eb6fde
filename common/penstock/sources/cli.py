"""The command `penstock fetch`. Light to import: `penstock --help` loads this module."""

import argparse
import json
import signal
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from penstock.sources import PERMANENT, Fetched, Progress, SourceError, resolved_version
from penstock.sources import fetch as fetch_source
from penstock.sources.parts import gib

HOPELESS: Final = 3
"""Exit status where another try at once would not help; 1 where it may."""
_SAY_S: Final = 5.0


def fetch(argv: list[str]) -> int:
    """Downloads a model into a folder that many may share; goes on with what an earlier call left."""
    options = _parser().parse_args(argv)
    progress = Progress()
    if options.port is not None:
        _serve(progress, options.host, options.port)
    ended = threading.Event()
    threading.Thread(target=_say, args=(progress, ended), daemon=True).start()
    # The first process of a container is ended by no signal that it does not handle; and the lock is to be let go.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if options.to is None:
            done = Fetched("", resolved_version(options.source, options.revision), 0)
        else:
            done = fetch_source(options.source, options.to, options.revision, progress)
    except SourceError as error:
        _report(options.result, {"reason": error.reason, "message": str(error)})
        sys.stderr.write(f"penstock fetch: {error.reason}: {error}\n")
        return HOPELESS if error.reason in PERMANENT else 1
    finally:
        ended.set()
        signal.signal(signal.SIGTERM, before)
    _report(options.result, asdict(done))
    sys.stdout.write(f"{options.to / done.folder if options.to else done.version}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock fetch", description=fetch.__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="hf://org/name or s3://bucket/path; credentials come from the environment")
    add(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="folder of models; the model gets a folder in it, whose path is printed (default: print only the commit)",
    )
    add("--revision", help="branch, tag or commit, for hf:// (default: main)")
    add("--result", type=Path, metavar="FILE", help="write the result to this file, as JSON")
    add("--host", default="127.0.0.1", help="address for --port (default: %(default)s)")
    add("--port", type=int, help="answer GET /progress on this port during the download")
    return parser


def _report(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result))


def _say(progress: Progress, ended: threading.Event) -> None:
    while not ended.wait(_SAY_S):
        now = progress.now
        waits = f" for {now.waits_for}" if now.waits_for else ""
        sys.stderr.write(f"{now.phase}{waits}: {gib(now.done)} of {gib(now.total)}\n")


def _serve(progress: Progress, host: str, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(asdict(progress.now)).encode()
            self.send_response(200 if self.path == "/progress" else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log no line for each request."""

    threading.Thread(target=ThreadingHTTPServer((host, port), Handler).serve_forever, daemon=True).start()
