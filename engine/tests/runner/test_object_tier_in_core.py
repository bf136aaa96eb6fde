"""Pages in an object store with a real model: another replica finds them, and a store that fails costs computation alone."""

import os
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from test_core_with_runner import requests
from test_disk_tier_in_core import run, start  # noqa: F401  a fixture

from penstock.engine.config import ConfigError
from penstock.engine.connectors import lower_tier, page_objects
from testing.ports import free_ports
from testing.source_servers import BucketServer, running

MOTO = Path(__file__).parents[3] / ".tools/s3/bin/moto_server"
URI, REAL = "s3://b/kv/pages", "s3://kv-pages/kv/pages"


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def bucket(monkeypatch):
    server = BucketServer({})
    with running(server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture
def s3(monkeypatch):
    """A real S3 server with the bucket `kv-pages`."""
    if not MOTO.exists():
        pytest.skip("moto is not installed: make kv-parts")
    [port] = free_ports(1)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    process = subprocess.Popen([MOTO, "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/kv-pages", method="PUT"), timeout=10).close()
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield url
    finally:
        process.kill()
        process.wait()


def objects(core):
    return core.stats().offload.lower["object"]


def ready(core):
    """The core, when it has looked at what others have stored."""
    core.step()
    while core.is_reading:
        core.step()
    return core


@pytest.mark.req("KO-26", "KO-30")
def test_another_replica_finds_in_a_real_object_store_what_one_has_stored(start, s3, tmp_path):  # noqa: F811
    batch = requests(adjusted=False)
    first = start(None, bucket=REAL)
    expected = run(first, batch)
    stored = objects(first)
    assert stored.stored_bytes > 0 and stored.loaded_bytes == 0 == stored.failed_pages
    second = ready(start(tmp_path, bucket=REAL))  # with a disk in front, which is empty
    assert objects(second).pages_used == stored.pages_used
    assert run(second, batch) == expected
    told = second.stats().offload
    assert told.lower["object"].loaded_bytes > 0 and told.loaded_tokens > 0 and told.lower["object"].failed_pages == 0
    assert told.lower["disk"].pages_used > 0, "what came from afar is on the disk now"
    assert second.scheduler.totals.prefix_hits > first.scheduler.totals.prefix_hits
    other = ready(start(None, bucket=REAL, load_format="dummy"))
    assert objects(other).pages_used == 0, "other weights"
    assert second.scheduler.kv.reset()
    while second.is_reading:
        second.step()
    assert objects(ready(start(None, bucket=REAL))).pages_used == 0, "what is forgotten is forgotten for others, too"


@pytest.mark.slow
@pytest.mark.req("KO-31")
@pytest.mark.parametrize("fault", ["403", "404", "500", "slow", "half", "other"])
def test_a_store_that_refuses_loses_cuts_delays_or_changes_pages_costs_computation_and_is_told(
    start,  # noqa: F811
    bucket,
    monkeypatch,
    caplog,
    fault,
):
    monkeypatch.setattr(page_objects, "TIMEOUT_S", 0.3)
    batch = requests(adjusted=False)[:4]
    expected = run(start(None, bucket=URI), batch)
    core = ready(start(None, bucket=URI))
    assert objects(core).pages_used == len(bucket.files) > 0
    names = list(bucket.files)
    match fault:
        case "slow":
            bucket.delay_s = 1.0
        case "half":
            bucket.served = {name: bucket.files[name][: len(bucket.files[name]) // 2] for name in names}
        case "other":
            bucket.served = dict(zip(names, [bucket.files[name] for name in [*names[1:], names[0]]], strict=True))
        case status:
            bucket.status_of_all = int(status)
    assert run(core, batch) == expected
    assert objects(core).failed_pages > 0 and objects(core).loaded_bytes == 0
    assert "could not be read from the object store, and is computed again" in caplog.text
    assert core.scheduler.kv.pool.num_used == 0 and core.scheduler.num_running == 0


def test_a_store_that_is_down_at_the_start_or_refuses_writes_costs_no_request(start, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(lower_tier, "PAUSE_S", 0.2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    batch = requests(adjusted=False)[:4]
    core = ready(start(None, bucket=URI))
    tokens = run(core, batch)
    assert objects(core).stored_bytes == 0 == objects(core).pages_used
    assert "that other replicas have stored are not known" in caplog.text
    assert "not written to the object store for 0.2 seconds" in caplog.text
    server = BucketServer({})
    with running(server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        assert run(start(None, bucket=URI), batch) == tokens and server.files


def test_what_others_store_meanwhile_is_found_at_the_next_look(start, bucket, monkeypatch):  # noqa: F811
    batch = requests(adjusted=False)[:4]
    late = ready(start(None, bucket=URI))
    expected = run(start(None, bucket=URI), batch)
    assert objects(late).pages_used == 0
    monkeypatch.setattr(lower_tier, "REFRESH_S", 0.0)
    late.step()
    monkeypatch.undo()
    os.environ["AWS_ENDPOINT_URL"] = bucket.url
    ready(late)
    assert objects(late).pages_used > 0
    assert run(late, batch) == expected and objects(late).loaded_bytes > 0


@pytest.mark.parametrize("uri", ["b/kv", "s3://b", "s3://b/", "gs://b/kv", "s3:///kv"])
def test_an_address_that_is_none_is_refused(uri):
    with pytest.raises(ConfigError, match=r"--kv-offload-bucket .*: expected s3://BUCKET/PATH"):
        page_objects.bucket_and_path(uri)
