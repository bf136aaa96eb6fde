"""Who fills a folder."""

import threading

import pytest

from penstock.sources import SourceError
from penstock.sources.lock import Lock


def lock(path, dead_s=0.3):
    return Lock(path, beat_s=0.02, dead_s=dead_s)


def test_the_second_waits_for_the_first_and_knows_whom(tmp_path):
    first, second = (lock(tmp_path / "m.lock", dead_s=60) for _ in range(2))
    first.acquire(lambda owner: None)
    told, got = threading.Event(), threading.Event()
    seen = []

    def wait():
        second.acquire(lambda owner: (seen.append(owner), told.set()))
        got.set()

    threading.Thread(target=wait).start()
    assert told.wait(60)
    assert not got.is_set()
    assert set(seen) == {first.owner}
    first.release()
    assert got.wait(60)
    second.check()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_dead_one_is_taken(tmp_path):
    (tmp_path / "m.lock").write_text("somebody.1.abc 7")
    mine = lock(tmp_path / "m.lock", dead_s=0.05)
    mine.acquire(lambda owner: None)
    mine.check()
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_taken_for_dead_learns_of_it(tmp_path):
    mine = lock(tmp_path / "m.lock")
    mine.acquire(lambda owner: None)
    other = tmp_path / "other"
    other.write_text("another.2.def 0")
    other.replace(tmp_path / "m.lock")
    mine._thread.join(60)
    with pytest.raises(SourceError, match="taken over"):
        mine.check()
    mine.release()
    assert (tmp_path / "m.lock").read_text() == "another.2.def 0", "it is the other's"


def test_a_lock_that_lives_again_is_put_back(tmp_path):
    path = tmp_path / "m.lock"
    path.write_text("another.2.def 5")
    lock(path)._break("somebody.1.abc 7")
    assert path.read_text() == "another.2.def 5"
    assert list(tmp_path.iterdir()) == [path]
