"""Pages on the disk with a real model: they outlive the process, and a damaged, foreign or absent file is computed anew."""

import errno
import os
import time

import msgspec
import pytest
from grids import mostly_slow
from test_core_with_runner import SCHEDULER, requests

from penstock.engine.config import ConfigError
from penstock.engine.connectors import lower_tier, page_files
from penstock.engine.connectors.moves import Move, file_bytes
from penstock.engine.connectors.namespace import weights_digest
from penstock.engine.core.ipc.process import build_core, build_executor


@pytest.fixture
def start(checkpoint, build_runner):
    """Starts engines whose KV cache has room for about two of ten requests."""
    cores = []

    def started(folder, family="llama", pages=400, disk=400, worker=False, bucket=None, store=None, stages=1, ranks=1, **model):
        runner = build_runner(checkpoint(family), scheduler=SCHEDULER)
        config, page = runner.config, runner.kv_layout().page_bytes
        sizes = {"num_blocks": 24 if family in ("llama", "deepseek-v2") else 44, "offload_bytes": pages * page}
        sizes["disk_folder"] = folder
        sizes |= {"disk_bytes": disk * file_bytes(page), "bucket": bucket, "bucket_bytes": 400 * file_bytes(page)}
        sizes |= {"store": store, "store_bytes": 400 * file_bytes(page)}
        cache = msgspec.structs.replace(config.cache, **sizes)
        model = msgspec.structs.replace(config.model, **model)
        sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
        parallel = msgspec.structs.replace(config.parallel, worker_process=worker, **sizes)
        scheduler = msgspec.structs.replace(config.scheduler, pipeline_stages=stages)
        fields = {"cache": cache, "model": model, "parallel": parallel, "scheduler": scheduler, "depth": stages}
        config = msgspec.structs.replace(config, **fields)
        executor, blocks = build_executor(config)
        try:
            core = build_core(config, executor, blocks, 1)
        except ConfigError:
            executor.close()
            raise
        cores.append(core)
        return core

    yield started
    for core in cores:
        core.close()


def run(core, batch) -> dict[int, list[int]]:
    tokens = {request.index: [] for request in batch}
    for request in batch:
        core.handle(request)
    deadline = time.monotonic() + 60
    while core.has_work or core.is_reading:
        assert time.monotonic() < deadline
        if (frame := core.step()) is not None:
            offsets, ids = memoryview(frame.offsets).cast("i"), memoryview(frame.token_ids).cast("i")
            for at, index in enumerate(memoryview(frame.indexes).cast("q")):
                tokens[index] += ids[offsets[at] : offsets[at + 1]]
    return tokens


def check_ranks_share(start, tier, **place):
    """Two ranks keep their halves of each page in a shared place, where two ranks of another replica find them."""
    batch = requests(adjusted=False)[:2]
    first = start(None, ranks=2, **place)
    expected = run(first, batch)
    assert first.stats().offload.lower[tier].stored_bytes > 0
    second = start(None, ranks=2, **place)
    assert run(second, batch) == expected
    found = second.stats().offload
    assert found.lower[tier].loaded_bytes > 0 < found.loaded_tokens and found.lower[tier].failed_pages == 0


def files(folder):
    return sorted(folder.rglob("*.page"))


@pytest.mark.req("KO-26", "KO-27")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_new_process_finds_what_the_one_before_has_written(start, tmp_path, family):
    batch = requests(adjusted=False)
    first = start(tmp_path, family)
    expected = run(first, batch)
    told = first.stats().offload
    assert (
        told.lower["disk"].pages_used == len(files(tmp_path)) > 0
        and told.lower["disk"].stored_bytes > 0
        and told.lower["disk"].loaded_bytes == 0
    )
    second = start(tmp_path, family)
    assert second.stats().offload.lower["disk"].pages_used == told.lower["disk"].pages_used
    assert run(second, batch) == expected
    told = second.stats().offload
    assert told.lower["disk"].loaded_bytes > 0 and told.loaded_tokens > 0 and told.lower["disk"].failed_pages == 0
    assert second.scheduler.totals.prefix_hits > first.scheduler.totals.prefix_hits
    assert second.scheduler.kv.pool.num_used == 0 and not list(tmp_path.rglob("*.part"))


def test_a_process_of_its_own_keeps_the_same_files(start, tmp_path):
    """What the core and a rank say to each other crosses a socket."""
    batch = requests(adjusted=False)
    expected = run(start(tmp_path), batch)
    core = start(tmp_path, worker=True)
    assert core.stats().offload.lower["disk"].pages_used == len(files(tmp_path)) and run(core, batch) == expected
    assert core.stats().offload.lower["disk"].loaded_bytes > 0 and core.stats().offload.lower["disk"].failed_pages == 0
    with pytest.raises(ConfigError, match=r"--kv-offload-disk-bytes .* does not fit"):
        start(tmp_path, worker=True, disk=1 << 40)


@pytest.mark.req("DX-09", "KO-27")
@pytest.mark.parametrize("family", mostly_slow(["llama", "qwen3-windows"], ("qwen3-windows",)))
def test_pipeline_stages_keep_the_pages_of_their_own_layers(start, tmp_path, family):
    """The namespaces of two stages differ, and a page that one of them has lost is a miss for both."""
    batch = requests(adjusted=False)
    expected = run(start(tmp_path / "whole", family), batch)
    folder = tmp_path / "staged"
    assert run(start(folder, family, stages=2), batch) == expected
    one, other = (files(each) for each in sorted(folder.iterdir()))
    assert [page.name for page in one] == [page.name for page in other] and len(one) > 0
    assert all(page.read_bytes() != twin.read_bytes() for page, twin in zip(one, other, strict=True))
    again = start(folder, family, stages=2)
    assert again.stats().offload.lower["disk"].pages_used == len(one) and run(again, batch) == expected
    told = again.stats().offload
    assert told.loaded_tokens > 0 and told.lower["disk"].loaded_bytes > 0 and told.lower["disk"].failed_pages == 0
    damaged = start(folder, family, stages=2)
    for page in other:
        page.write_bytes(bytes(page.stat().st_size))
    assert run(damaged, batch) == expected
    told = damaged.stats().offload
    assert told.lower["disk"].failed_pages > 0 and told.lower["disk"].loaded_bytes == 0
    assert damaged.scheduler.kv.pool.num_used == 0


@pytest.mark.req("DX-04", "KO-27")
def test_one_rank_keeps_a_latent_for_all_that_have_it(start, tmp_path):
    """One copy of each page in the host's memory and on the disk, which a replica with another number of ranks can read."""
    batch = requests(adjusted=False)
    core = start(tmp_path, "deepseek-v2", ranks=2)
    expected = run(core, batch)
    assert run(core, batch) == expected
    told, [node] = core.stats().offload, core._executor._nodes
    taken = [512 * os.fstat(memory).st_blocks for memory in node._page_memory]
    assert told.memory.loaded_bytes > 0 == told.memory.failed_pages
    assert taken[0] >= told.memory.stored_bytes > 0 == taken[1], "rank 0 alone has written"
    assert told.memory.pages == 2 * 400, "it has what both ranks give"
    found = files(tmp_path)
    assert len({page.parent.parent for page in found}) == 1 and len(found) == told.lower["disk"].pages_used
    other = start(tmp_path, "deepseek-v2", ranks=1)
    assert other.stats().offload.lower["disk"].pages_used == len(found) and run(other, batch) == expected
    read = other.stats().offload.lower["disk"]
    assert read.loaded_bytes > 0 == read.failed_pages


@pytest.mark.req("KO-27", "KO-31")
@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "foreign"])
def test_a_file_that_is_not_what_was_written_is_a_miss(start, tmp_path, damage):
    batch = requests(adjusted=False)
    expected = run(start(tmp_path), batch)
    core = start(tmp_path)  # it has seen the files whole
    pages = files(tmp_path)
    for page, other in zip(pages, [*pages[1:], pages[0]], strict=True):
        content = page.read_bytes()
        match damage:
            case "flipped":
                page.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
            case "short":
                page.write_bytes(content[: len(content) // 2])
            case "gone":
                page.unlink()
            case _:
                page.write_bytes(other.read_bytes())
    assert run(core, batch) == expected
    told = core.stats().offload
    assert told.lower["disk"].failed_pages > 0
    assert told.lower["disk"].loaded_bytes == 0
    assert core.scheduler.kv.pool.num_used == 0


@pytest.mark.req("KO-27")
def test_replicas_with_other_weights_share_a_disk_and_no_page(start, tmp_path, checkpoint):
    batch = requests(adjusted=False)
    run(start(tmp_path), batch)
    before = files(tmp_path)
    other = start(tmp_path, load_format="dummy")
    assert other.stats().offload.lower["disk"].pages_used == 0
    run(other, batch)
    assert other.stats().offload.lower["disk"].loaded_bytes == 0
    assert set(before) < set(files(tmp_path)) and len({page.parents[1] for page in files(tmp_path)}) == 2
    assert weights_digest(checkpoint("llama")) != weights_digest(checkpoint("gemma2"))


def test_one_changed_tensor_is_other_weights(checkpoint, tmp_path):
    for file in checkpoint("llama").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert weights_digest(tmp_path) == weights_digest(checkpoint("llama"))
    weights = next(tmp_path.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert weights_digest(tmp_path) != weights_digest(checkpoint("llama"))


@pytest.mark.req("KO-27")
def test_the_quota_is_kept_and_the_oldest_file_goes_first(start, tmp_path):
    core = start(tmp_path, disk=20)
    run(core, requests(adjusted=False))
    told = core.stats().offload
    assert len(files(tmp_path)) <= 20 and told.lower["disk"].pages_used <= 20 and told.lower["disk"].evicted_pages > 0
    smaller = start(tmp_path, disk=5)
    while smaller.is_reading:
        smaller.step()
    assert len(files(tmp_path)) == smaller.stats().offload.lower["disk"].pages_used == 5


def test_a_reset_removes_the_files(start, tmp_path):
    core = start(tmp_path)
    run(core, requests(adjusted=False))
    assert files(tmp_path) and core.scheduler.kv.reset()
    while core.is_reading:
        core.step()
    assert not files(tmp_path) and core.stats().offload.lower["disk"].pages_used == 0


def test_a_disk_without_room_costs_writes_and_no_request(start, tmp_path, monkeypatch, caplog):
    batch = requests(adjusted=False)
    core, real = start(tmp_path), os.write

    def full(fd, data):
        if len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(page_files.os, "write", full)
    monkeypatch.setattr(lower_tier, "PAUSE_S", 0.5)
    tokens = run(core, batch)
    told = core.stats().offload
    assert told.lower["disk"].stored_bytes == 0 and not files(tmp_path) and not list(tmp_path.rglob("*.part"))
    assert "not written to the disk for 0.5 seconds" in caplog.text and "No space left" in caplog.text
    monkeypatch.undo()
    assert tokens == run(start(tmp_path), batch)


def test_a_folder_that_cannot_be_used_stops_the_start_by_name(start, tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match=rf"--kv-offload-directory {taken} cannot be used: (Not a directory|File exists)"):
        start(taken)
    with pytest.raises(ConfigError, match=r"--kv-offload-disk-bytes \d+ does not fit into .* are free"):
        start(tmp_path, disk=1 << 40)
    with pytest.raises(ConfigError, match=r"--kv-offload-disk-bytes 0 holds no page, whose file has"):
        start(tmp_path, disk=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_stops_the_start(start, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be used: Permission denied"):
        start(tmp_path)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES])
def test_direct_io_is_probed_and_other_errors_are_told(start, tmp_path, monkeypatch, code):
    real = os.open

    def refusing(path, flags, *more, **rest):
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *more, **rest)

    monkeypatch.setattr(page_files.os, "open", refusing)
    if code == errno.EACCES:
        with pytest.raises(ConfigError, match="cannot be used: Permission denied"):
            start(tmp_path)
        return
    batch = requests(adjusted=False)
    expected = run(start(tmp_path), batch)
    second = start(tmp_path)
    assert run(second, batch) == expected and second.stats().offload.lower["disk"].loaded_bytes > 0


def test_what_a_dead_process_has_begun_is_removed_and_what_a_live_one_writes_is_not(start, tmp_path):
    run(start(tmp_path), requests(adjusted=False))
    folder = files(tmp_path)[0].parent
    old, new = folder / "old.part", folder / "new.part"
    for part in (old, new):
        part.write_bytes(b"begun")
    os.utime(old, (0, 0))
    start(tmp_path)
    assert new.exists() and not old.exists()


def test_a_move_of_a_strange_name_is_told_as_failed(start, tmp_path):
    core = start(tmp_path)
    runner = core._executor._runner
    runner.move_pages("disk", [Move(1, "read", 0, b"\1\2", 0)])
    ended = {}
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        ended = runner.take_moved("disk")
    assert "FileNotFoundError" in ended[1].error
