"""Models from servers, into a folder that many share."""

import hashlib
import json
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest

from penstock.sources import SourceError, fetch, local_folder, parts, resolved_version
from penstock.sources.progress import Progress
from penstock.sources.store import MARKER
from testing.ports import free_ports
from testing.source_servers import COMMIT

WHOLE = {"config.json", "model.safetensors", "sub/tokenizer.json"}


@pytest.fixture(params=["hub", "bucket"])
def place(request):
    """(server, URI, prefix of the server's paths)"""
    server = request.getfixturevalue(request.param)
    return (server, "hf://org/name", "") if request.param == "hub" else (server, "s3://b/team/m", "team/m/")


def files(folder: Path) -> dict[str, bytes]:
    return {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file() and it.name != MARKER}


def test_a_model_is_there_whole_with_a_marker_of_its_digests(place, tmp_path):
    server, uri, prefix = place
    progress = Progress()
    done = fetch(uri, tmp_path / "v", progress=progress)
    folder = tmp_path / "v" / done.folder
    assert files(folder) == {path: server.files[prefix + path] for path in WHOLE}  # and no pickle
    marker = json.loads((folder / MARKER).read_text())
    assert marker["source"] == uri
    assert (
        marker["files"]["model.safetensors"]["digest"]
        == "sha256:" + hashlib.sha256(files(folder)["model.safetensors"]).hexdigest()
    )
    assert (progress.now.phase, progress.now.done) == ("done", done.size) == ("done", sum(map(len, files(folder).values())))
    assert [it.name for it in (tmp_path / "v/.penstock").iterdir()] == []
    before = len(server.ranges)
    assert fetch(uri, tmp_path / "v") == done
    assert len(server.ranges) == before, "nothing is fetched twice"


def test_a_download_that_broke_off_is_no_model_and_is_gone_on_with(place, tmp_path):
    server, uri, prefix = place
    server.break_after = 6
    with pytest.raises(SourceError) as error:
        fetch(uri, tmp_path)
    assert error.value.reason == "Unreachable"
    assert [it.name for it in tmp_path.iterdir()] == [".penstock"]
    server.break_after = 10**9
    progress = Progress()
    done = fetch(uri, tmp_path, progress=progress)
    assert files(tmp_path / done.folder) == {path: server.files[prefix + path] for path in WHOLE}
    asked = Counter(server.ranges)
    assert sum(count == 1 for count in asked.values()) >= 6, "parts that came are not asked for again"
    assert sum(asked.values()) < 2 * len(asked)


def test_what_was_changed_on_its_way_is_refused_and_fetched_anew(place, tmp_path):
    server, uri, prefix = place
    name = f"{prefix}model.safetensors"
    server.served[name] = b"\xff" + server.files[name][1:]
    with pytest.raises(SourceError, match=r"model\.safetensors: what came has not the source's digest") as error:
        fetch(uri, tmp_path)
    assert error.value.reason == "ChecksumMismatch"
    assert [it.name for it in tmp_path.iterdir()] == [".penstock"]
    del server.served[name]
    done = fetch(uri, tmp_path)
    assert files(tmp_path / done.folder)["model.safetensors"] == server.files[name]


def test_an_etag_that_is_no_digest_since_a_key_encrypts_is_no_verdict(bucket, tmp_path):
    bucket.served["team/m/config.json"] = b"X" * len(bucket.files["team/m/config.json"])
    bucket.headers["x-amz-server-side-encryption"] = "aws:kms"
    done = fetch("s3://b/team/m", tmp_path)
    assert files(tmp_path / done.folder)["config.json"].startswith(b"XX")


@pytest.mark.parametrize(
    ("status", "reason", "sentence"),
    [(401, "Unauthorized", "wants other credentials"), (403, "Forbidden", "may not read it"), (404, "NotFound", "no such thing")],
)
def test_refusals_say_what_to_look_at_and_never_a_secret(place, tmp_path, monkeypatch, status, reason, sentence):
    server, uri, prefix = place
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    for path in ("", f"{prefix}config.json"):
        server.status = {path: status}
        with pytest.raises(SourceError, match=sentence) as error:
            fetch(uri, tmp_path)
        assert error.value.reason == reason
        assert uri in str(error.value)
        assert "secret" not in str(error.value).replace("AWS_SECRET_ACCESS_KEY", "")


def test_a_secret_in_a_message_is_struck_out(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert str(SourceError("Unreachable", "told hf_very_secret to it")) == "told [HF_TOKEN] to it"


def test_room_is_looked_for_before_anything_comes(place, tmp_path, monkeypatch):
    server, uri, _ = place
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(SourceError, match=r"the volume has 0\.0 MiB free") as error:
        fetch(uri, tmp_path)
    assert error.value.reason == "NoSpace"
    assert server.ranges == []


def test_a_volume_that_fills_up_meanwhile_says_so(hub, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts.os, "pwrite", full)
    with pytest.raises(SourceError, match="the volume is full") as error:
        fetch("hf://org/name", tmp_path)
    assert error.value.reason == "NoSpace"


def test_a_folder_that_takes_no_files_says_so(hub, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError) as error:
        fetch("hf://org/name", tmp_path / "file")
    assert error.value.reason == "NotWritable"


def test_of_several_one_fetches_and_the_others_wait(place, tmp_path):
    server, uri, _ = place
    done = []
    threads = [threading.Thread(target=lambda: done.append(fetch(uri, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    assert len(set(done)) == 1
    assert max(Counter(server.ranges).values()) == 1


def test_a_bucket_with_other_content_is_another_version(bucket, tmp_path):
    first = fetch("s3://b/team/m", tmp_path)
    bucket.files["team/m/config.json"] = b'{"architectures": ["Y"]}'
    second = fetch("s3://b/team/m", tmp_path)
    assert first.version != second.version == resolved_version("s3://b/team/m")
    assert files(tmp_path / first.folder)["config.json"] != files(tmp_path / second.folder)["config.json"]


def test_an_object_that_changes_meanwhile_is_refused(bucket, tmp_path, monkeypatch):
    from penstock.sources.bucket import Bucket

    listed = Bucket("s3://b/team/m").resolve()
    bucket.status["team/m/config.json"] = 412
    monkeypatch.setattr(Bucket, "resolve", lambda self: listed)
    with pytest.raises(SourceError, match="changed during the download"):
        fetch("s3://b/team/m", tmp_path)


def test_a_path_that_leads_out_of_the_folder_is_refused(hub, tmp_path):
    hub.files["../evil.json"] = b"{}"
    with pytest.raises(SourceError, match="no path below a folder"):
        fetch("hf://org/name", tmp_path)


def test_a_revision_names_a_commit(hub):
    assert resolved_version("hf://org/name", "main") == COMMIT


def test_serving_from_a_bucket_keeps_the_model_in_the_cache_folder(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = local_folder("s3://b/team/m")
    assert folder.parent == tmp_path / "penstock/models"
    assert set(files(folder)) == WHOLE


@pytest.mark.parametrize(
    ("uri", "revision", "sentence"),
    [
        ("hf://name", None, "expected hf://organisation/name"),
        ("s3://bucket", None, "expected s3://bucket/path"),
        ("s3://bucket/m", "v1", "a revision"),
        ("file:///m", None, "only hf:// and s3:// are fetched"),
    ],
)
def test_what_cannot_be_fetched_is_refused(tmp_path, uri, revision, sentence):
    with pytest.raises(SourceError, match=sentence) as error:
        fetch(uri, tmp_path, revision)
    assert error.value.reason == "InvalidSource"


def test_a_bare_name_is_the_hubs_where_there_is_no_such_folder(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(repo, *, revision, **_):
        asked.append((repo, revision))
        return str(tmp_path / "cache")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert local_folder("Org-1/name_2.5-B") == local_folder("Org-1/name_2.5-B", "v1") == tmp_path / "cache"
    assert asked == [("Org-1/name_2.5-B", "main"), ("Org-1/name_2.5-B", "v1")]
    own = tmp_path / "Org-1/name_2.5-B"
    own.mkdir(parents=True)
    assert local_folder("Org-1/name_2.5-B") == own
    for path in ("org/name/x", "./org/other", "org", "~/name", "/org/name"):
        with pytest.raises(SourceError, match="does not exist"):
            local_folder(path)
    assert len(asked) == 2


def test_a_hub_that_cannot_be_reached_is_told_in_one_line_with_the_cause(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(SourceError) as caught:
        local_folder("org/name")
    said = str(caught.value)
    assert "'org/name': there is no such folder here, and hf://org/name at revision main: the Hub cannot be reached:" in said
    assert "refused" in said.lower() and "\n" not in said
