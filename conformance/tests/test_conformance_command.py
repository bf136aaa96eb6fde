"""The command: what it takes, what it says, and how it ends."""

import contextlib
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.epp_conformance.cli import main
from penstock.epp_conformance.report import listing
from penstock.epp_conformance.suite import GROUPS
from testing.ports import free_ports

ROOT = Path(__file__).parents[2]
KNOWN = ("--model", "tiny", "--endpoint", "127.0.0.1:7001", "--endpoint", "127.0.0.1:7002")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--target"),
        (["--target", "127.0.0.1:1"], "--model"),
        (["--target", "127.0.0.1:1", "--model", "m"], "--endpoint"),
        (["--target", "nowhere"], "HOST:PORT"),
        (["--target", "host:0"], "HOST:PORT"),
        (["--target", "::1:9002"], "HOST:PORT"),
        (["--target", "http://host:1"], "HOST:PORT"),
        (["--target", "127.0.0.1:1", *KNOWN, "--at-once", "0"], "--at-once"),
        (["--target", "127.0.0.1:1", *KNOWN, "--timeout", "nan"], "--timeout"),
        (["--endpoint", "name:80"], "IP:PORT"),
        (["--only", "duplex-pik"], "duplex-pik"),
        (["--skip", "nothing*"], "nothing*"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert named in capsys.readouterr().err


def test_nobody_at_the_target_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", f"127.0.0.1:{free_ports(1)[0]}", *KNOWN]) == 2
    assert capsys.readouterr().out == ""


def test_an_endpoint_that_somebody_else_serves_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Nonsense) as taken:
        endpoint = f"127.0.0.1:{taken.server_address[1]}"
        assert main(["--target", "127.0.0.1:1", "--model", "m", "--endpoint", endpoint, "--serve-endpoints"]) == 2
    assert str(taken.server_address[1]) in capsys.readouterr().err


class Nonsense(socketserver.BaseRequestHandler):
    """A server that is no picker: it says the same to whatever it hears."""

    answer = b""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(self.answer)
            while self.request.recv(1000):
                self.request.sendall(self.answer)


@pytest.fixture(params=[b"", b"HTTP/1.1 200 OK\r\n\r\n", bytes(range(256)) * 10], ids=["silence", "HTTP/1", "bytes"])
def nonsense(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (Nonsense,), {"answer": request.param})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_whatever_answers_is_judged_and_never_breaks_the_suite(nonsense: str, tmp_path: Path) -> None:
    fast = ("--timeout", "0.3", "--at-once", "32", "--skip", "stream-reset*", "--skip", "health")
    assert main(["--target", nonsense, *KNOWN, *fast, "--json", str(tmp_path / "r.json")]) == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["summary"]["MUST"]["pass"] <= 1, "silence is what observability mode asks for"
    assert {check["outcome"] for check in result["checks"] if check["group"] == "envoy"} == {"n/a"}
    assert all(check["detail"] for check in result["checks"] if check["outcome"] != "pass")


def test_the_list_shows_what_would_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "subset", "--skip", "subset-empty-*"]) == 0
    said = capsys.readouterr().out
    assert "`subset-list` | MUST" in said
    assert "subset-empty-list" not in said and "duplex-pick" not in said


def test_names_are_one_of_a_kind_and_statements_are_sentences() -> None:
    checks = [check for group in GROUPS for check in group.checks]
    assert len({check.name for check in checks}) == len(checks) > 100
    for check in checks:
        assert check.statement.endswith(".") and check.source, check.name


def test_the_documented_list_is_the_suites() -> None:
    text = (ROOT / "docs/gateway/conformance.md").read_text()
    documented = text.partition("<!-- checks -->\n")[2].partition("<!-- end of checks -->")[0]
    assert documented.strip() == listing(GROUPS).strip(), "penstock-epp-conformance --list prints it"
