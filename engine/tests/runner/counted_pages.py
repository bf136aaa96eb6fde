"""Which pages go to a shared store and come from it."""

import zlib

import pytest

from penstock.engine.connectors.page_mover import PageMover

Pages = dict[str, dict[tuple[int, bytes], int]]


def count_pages(monkeypatch: pytest.MonkeyPatch, store: type[PageMover]) -> Pages:
    """What is written and read in full from now on: CRC-32 of the pages by name."""
    pages: Pages = {"write": {}, "read": {}}

    def fill(mover, move, page):
        pages["read"][move.group, move.block_hash] = zlib.crc32(page)
        filled(mover, move, page)

    def write(mover, move):
        pages["write"][move.group, move.block_hash] = zlib.crc32(mover.slots[move.slot].tobytes())
        written(mover, move)

    filled, written = store.fill, store._write
    monkeypatch.setattr(store, "fill", fill)
    monkeypatch.setattr(store, "_write", write)
    return pages
