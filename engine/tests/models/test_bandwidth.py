"""The floor of a load: bytes over the bandwidth of their storage."""

import os
import time
from pathlib import Path

import pytest

from penstock.engine.loading import bandwidth
from penstock.engine.loading.bandwidth import load_floor_s


def file_of(folder: Path, name: str, size: int) -> Path:
    (folder / name).write_bytes(os.urandom(1 << 16) * (size >> 16))
    return folder / name


@pytest.mark.req("LD-12")
def test_all_bytes_count_at_the_speed_of_the_largest_file(tmp_path, monkeypatch):
    """A stand-in for a disk of 100 MB/s."""
    clock = [0.0]

    def read(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        clock[0] += count / 1e8
        return count

    real = os.preadv
    monkeypatch.setattr(bandwidth.os, "preadv", read)
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: clock[0])
    files = [file_of(tmp_path, "a", 16 << 20), file_of(tmp_path, "b", 8 << 20)]
    assert load_floor_s(files) == pytest.approx((24 << 20) / 1e8)


def test_a_large_checkpoint_is_not_read_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "PIECE", 1 << 20)
    read = []
    real = os.preadv
    monkeypatch.setattr(bandwidth.os, "preadv", lambda *given: read.append(given[2]) or real(*given))
    assert load_floor_s([file_of(tmp_path, "a", 8 << 20)]) > 0
    assert max(read) == 0


def test_a_file_system_without_o_direct_is_read_as_usual(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(bandwidth.os, "open", refuse)
    began = time.perf_counter()
    assert load_floor_s([file_of(tmp_path, "a", 1 << 20)]) > 0
    assert time.perf_counter() - began < 30


def test_made_up_weights_have_no_floor():
    assert load_floor_s([]) == 0.0
