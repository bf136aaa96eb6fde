"""`make gpu-report` without a GPU: the whole way with stand-ins, and what becomes of items that fail or hang."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_publish  # noqa: E402
import gpu_report  # noqa: E402
from gpu import sampling, sweep, test_file, trace  # noqa: E402
from gpu.clock import HostClock  # noqa: E402
from gpu_report import Item, Report, run_item, run_items, summary  # noqa: E402

from penstock.kernels.sampling.ops import CPU  # noqa: E402

pytestmark = pytest.mark.slow

HEAD = {"machine": {"device": "one"}, "source": "abc", "dry_run": False, "began": "now"}


def environment():
    return gpu_report.environment_of(ROOT / "nowhere", ROOT / "nowhere")


def test_a_dry_run_passes_through_everything_and_a_second_one_has_nothing_to_do(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu_report.py"), "--dry-run", "--out", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    wanted = {(item.part, item.name) for group in gpu_report.items(dry=True) for item in group}
    assert {(part, name) for part in ("tests", "figures", "sweeps", "traces") for name in found[part]} == wanted
    assert all(its["ended"] for part in ("tests", "figures", "sweeps", "traces") for its in found[part].values())
    assert found["sweeps"]["decode"]["best"] and found["traces"]["qwen3-0.6b"]["rows"][0]["launches"] == 1
    suites = ET.parse(tmp_path / "report.junit.xml").getroot()
    compiled = {f"{file} --compiled" for file in gpu_report.COMPILED}
    assert {suite.get("name") for suite in suites} == {*gpu_report.TESTS, *gpu_report.TESTS_ALONE, *compiled}
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0 and "  0 s" not in again.stdout, "nothing was run a second time"


@pytest.mark.parametrize(
    ("word", "files"), [("mark.gpu", (*gpu_report.TESTS, *gpu_report.TESTS_ALONE)), ("triton_device", gpu_report.COMPILED)]
)
def test_every_file_with_tests_for_a_gpu_is_in_a_list(word, files):
    found = {
        file.relative_to(ROOT).as_posix()
        for package in ("kernels", "engine")
        for file in (ROOT / package / "tests").rglob("test_*.py")
        if word in file.read_text()
    }
    assert found == set(files)


def item(code: str, name: str = "x", limit_s: float = 30.0) -> Item:
    return Item("figures", name, limit_s, ("-c", code))


def test_what_is_known_is_kept_when_an_item_hangs_or_breaks(tmp_path):
    report = Report(tmp_path / "r.json", HEAD)
    hangs = "import time; print('{\"rows\": [1]}', flush=True); print('{\"rows\": [2]}', flush=True); time.sleep(60)"
    run_item(item(hangs, "hangs"), 3.0, report, environment())
    run_item(item("raise SystemExit('no such kernel')", "breaks"), 30.0, report, environment())
    run_item(item("print('{\"value\": 2.0}')", "works"), 30.0, report, environment())
    found = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert (found["hangs"]["rows"], found["hangs"]["failed"]) == ([1, 2], "stopped after 3 s")
    assert found["breaks"]["failed"] == "no such kernel"
    assert (found["works"]["value"], found["works"]["ended"]) == (2.0, True)
    assert "figures: breaks: no such kernel" in list(summary(report.found, []))


def test_a_second_run_goes_on_where_the_first_one_stopped_and_another_source_begins_anew(tmp_path):
    first = Report(tmp_path / "r.json", HEAD)
    first.add(item("", "done"), {"value": 1.0, "ended": True})
    first.add(item("", "cut"), {"rows": [1], "ended": False})
    ran: list[str] = []
    second = Report(tmp_path / "r.json", {**HEAD, "began": "later"})
    groups = [[item("", "done"), item("", "cut")], [item("", "new")]]
    run_items(groups, 100.0, second, lambda it, limit_s: ran.append(it.name), lambda: 0.0)
    assert ran == ["cut", "new"] and second.found["began"] == "now"
    assert Report(tmp_path / "r.json", {**HEAD, "source": "other"}).found["figures"] == {}
    assert Report(tmp_path / "r.json", HEAD, again=True).found["figures"] == {}


def test_what_time_does_not_suffice_for_is_named(tmp_path):
    clock = iter([0.0, 0.0, 95.0])
    groups = [[item("", "one", 60.0)], [item("", "two")]]
    limits: list[float] = []
    left_out = run_items(groups, 100.0, Report(tmp_path / "r.json", HEAD), lambda it, s: limits.append(s), lambda: next(clock))
    assert limits == [60.0] and [it.name for it in left_out] == ["two"]
    assert "figures: two: no time was left; run the same command again" in list(
        summary(Report(tmp_path / "x", HEAD).found, left_out)
    )


def test_a_test_that_fails_is_a_finding_with_its_words(capsys):
    lines = test_file.Lines(sys.stdout)
    lines.say("test_a", "passed", 0.1, "")
    lines.say("test_b[1]", "failed", 0.2, "E assert 1 == 2")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["tests"], last["failed_tests"]) == (2, 1)
    assert last["rows"] == [{"test": "test_b[1]", "outcome": "failure", "seconds": 0.2, "message": "E assert 1 == 2"}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.parametrize(
    ("file", "option"), [("kernels/tests/test_gpu_reference.py", []), ("kernels/tests/test_triton_norm.py", ["--compiled"])]
)
def test_a_files_gpu_tests_are_collected_by_name(file, option):
    """Also those that interpret kernels where they are not asked for as compiled ones."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu.test_file", file, *option],
        cwd=ROOT / "benchmarks", env={**environment(), "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["tests"] == last["skipped_tests"] > 0


def test_sampling_is_held_to_one_read_of_the_logits_in_bfloat16():
    read: list[int] = []

    class Read(HostClock):
        def seconds(self, work, *, repeats=20, flush=True):
            of = (work.__defaults__ or (None,))[0]
            read.append(0 if of is None else of.element_size())
            return super().seconds(work, repeats=1)

    found = sampling.measure("cpu", rows=3, vocab=200, clock=Read(), ops=CPU)
    assert read == [0, *[2, 4] * len(sampling.KINDS)]
    assert [row["kind"] for row in found["rows"]] == list(sampling.KINDS)
    assert found["value"] > 0 and found["rows"][0]["over_a_read"] > 0 and found["rows"][0]["float32_us"] > 0


def test_the_best_launch_is_told_beside_the_tables_own():
    def attend(q, cache, batch, scale, table):
        launch = table(None, 0, 0, 0, 0)[-1]
        if launch.num_stages == 5:
            raise RuntimeError("out of shared memory\nmore")
        times.append(3.0 if launch.num_warps == 4 else 1.0)
        return q

    class Clock(HostClock):
        def seconds(self, work, *, repeats=20, flush=True):
            work()
            return times[-1]

    times: list[float] = []
    found = list(sweep.sweep("decode", attend, Clock(), [(64, 2, 1, 64)], torch.float32))
    rows = [row for it in found for row in it.get("rows", [])]
    assert {row["failed"] for row in rows if "failed" in row} == {"RuntimeError: out of shared memory"}
    [best] = found[-1]["best"].values()
    assert best["num_warps"] == 8
    assert len({tuple(row[key] for key in sweep.VARIED) for row in rows}) == len(rows), "no launch is tried twice"


def test_a_trace_adds_up_launches_gaps_and_kernels():
    ran = [trace.Ran("b", 30.0, 40.0), trace.Ran("a", 0.0, 10.0), trace.Ran("a", 10.0, 25.0)]
    told = trace.told(trace.KINDS[0], ran)
    assert (told["launches"], told["span_us"], told["idle_us"]) == (3, 40.0, 5.0)
    assert told["kernels"][0] == {"name": "a", "launches": 2, "us": 25.0}


def test_a_row_has_run_when_all_of_its_tests_passed():
    tests = {
        "a.py": {"rows": [{"test": "test_x[1]", "outcome": "passed"}, {"test": "test_x[2]", "outcome": "failure"}]},
        "b.py": {"rows": [{"test": "test_y", "outcome": "passed"}, {"test": "test_z", "outcome": "skipped"}]},
        "c.py --compiled": {"rows": [{"test": "test_w", "outcome": "passed"}]},
    }
    shown = {
        "R-1": ["a.py::test_x"],
        "R-2": ["b.py::test_y", "cpu.py::test_q"],
        "R-3": ["b.py::test_z"],
        "R-4": ["cpu.py::test_q"],
        "R-5": ["c.py::test_w"],
    }
    assert gpu_publish.rows_run({"tests": tests}, shown) == ["R-2", "R-5"]


def test_figures_are_published_with_the_machine_the_day_and_what_failed():
    figures = {"itl_8b": {"value": 4.4, "bound_by": "the roofline"}, "start": {"failed": "stopped after 150 s"}}
    found = {"machine": {"device": "H200"}, "began": "2026-11-23T12:00:00+00:00", "figures": figures}
    page = gpu_publish.published(gpu_publish.PAGE.read_text(), gpu_publish.figures_table(found))
    assert "Measured on 2026-11-23: device H200." in page
    assert "| 8B, batch 1, time between tokens at 1k | 4.6 ms | 4.4 ms | the roofline |" in page
    assert "| failed: stopped after 150 s |" in page and "| failed: never run |" in page
    with pytest.raises(ValueError, match="there is no <!-- figures"):
        gpu_publish.published("nothing", "")


def test_the_report_of_a_dry_run_is_not_published(tmp_path, monkeypatch, capsys):
    report = tmp_path / "r.json"
    report.write_text(json.dumps({"dry_run": True}))
    monkeypatch.setattr(sys, "argv", ["gpu_publish.py", str(report)])
    assert gpu_publish.main() == 2 and "dry run" in capsys.readouterr().err
