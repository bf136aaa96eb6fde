"""`penstock dashboards`: what it lists, writes, links to, and puts into a Grafana over HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.operator.dashboards.cli import dashboards

UIDS = {f"penstock-{name}" for name in ("fleet", "model", "engine", "picker", "envoy", "autoscaler", "tenants")}
COMMITTED = Path(__file__).parents[2] / "manifests" / "monitoring"


class Grafana(ThreadingHTTPServer):
    """As much of Grafana's HTTP API as is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/grafana"


class _Handler(BaseHTTPRequestHandler):
    server: Grafana

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != "Bearer sesame":
            self._answer(401, {"message": "Invalid API key"})
        elif self.path != "/grafana/api/dashboards/db":
            self._answer(404, {"message": "Not found"})
        elif body.get("folderUid") == "nowhere":
            self._answer(400, {"message": "folder not found"})
        else:
            self.server.taken.append(body)
            self._answer(200, {"status": "success", "uid": body["dashboard"]["uid"]})

    def _answer(self, status: int, said: dict[str, str]) -> None:
        payload = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    server = Grafana()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_lists_each_with_the_question_that_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboards([]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    for uid in UIDS:
        (at,) = (n for n, line in enumerate(lines) if line.endswith(f" {uid}"))
        assert len(lines[at + 1].strip()) > 40
    assert "monitoring.enabled=true" in said and "/d/" not in said


def test_links_carry_the_model_where_a_dashboard_can_choose_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboards(["--url", "https://grafana.example.com/", "--model", "team-a/llama"]) == 0
    links = {line.strip() for line in capsys.readouterr().out.splitlines() if "/d/" in line}
    own = "https://grafana.example.com/d/penstock-{}?var-namespace=team-a&var-model=llama"
    assert links == {
        "https://grafana.example.com/d/penstock-fleet?var-namespace=team-a",
        "https://grafana.example.com/d/penstock-tenants",
        *(own.format(name) for name in ("model", "engine", "picker", "envoy", "autoscaler")),
    }


def test_what_is_written_is_what_is_committed_and_what_the_sidecar_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    assert dashboards(["--export", str(folder)]) == 0
    assert {it.name for it in folder.iterdir()} == {f"{uid}.json" for uid in UIDS} | {"configmaps.yaml"}
    for uid in UIDS:
        assert (folder / f"{uid}.json").read_text() == (COMMITTED / "dashboards" / f"{uid}.json").read_text()
    maps = list(yaml.safe_load_all((folder / "configmaps.yaml").read_text()))
    kustomized = yaml.safe_load((COMMITTED / "kustomization.yaml").read_text())
    assert {it["metadata"]["name"] for it in maps} == {it["name"] for it in kustomized["configMapGenerator"]}
    for it in maps:
        assert (it["kind"], it["metadata"]["labels"]) == ("ConfigMap", kustomized["generatorOptions"]["labels"])
        ((name, text),) = it["data"].items()
        assert text == (folder / name).read_text()
    assert str(folder / "configmaps.yaml") in capsys.readouterr().out


def test_it_puts_them_into_a_grafana_with_the_runbooks_where_people_read_them(
    grafana: Grafana, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("sesame\n")
    given = ["--url", grafana.url, "--import", "--token-file", str(tmp_path / "token")]
    assert dashboards([*given, "--folder", "llms", "--runbook-url", "https://wiki.example.com/books/"]) == 0
    assert {it["dashboard"]["uid"] for it in grafana.taken} == UIDS
    for it in grafana.taken:
        assert (it["overwrite"], it["folderUid"], it["dashboard"]["id"]) == (True, "llms", None)
    text = json.dumps(grafana.taken)
    assert "https://wiki.example.com/books/PenstockNoReadyReplica.md" in text and "docs/runbooks" not in text
    assert f"{grafana.url}/d/penstock-fleet" in capsys.readouterr().out
    assert dashboards([*given, "--folder", "nowhere"]) == 1
    assert "400 folder not found" in capsys.readouterr().err


def test_what_grafana_refuses_and_where_there_is_none(
    grafana: Grafana, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dashboards(["--url", grafana.url, "--import"]) == 1
    assert "401 Invalid API key" in capsys.readouterr().err
    grafana_that_was = "http://127.0.0.1:1"
    assert dashboards(["--url", grafana_that_was, "--import"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert dashboards(["--url", grafana.url, "--import", "--token-file", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    assert not grafana.taken


@pytest.mark.parametrize(
    "given", [["--import"], ["--model", "a/b"], ["--url", "u", "--token-file", "t"], ["--url", "u", "--model", "b"]]
)
def test_flags_that_say_nothing_together_are_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        dashboards(given)
    assert ended.value.code == 2
