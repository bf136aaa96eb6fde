"""An image's size by its header: what Pillow says, or nothing."""

import io
import random

import pytest
from PIL import Image

from penstock.prompt.image_size import DynamicSize, image_size

SIZES = [(1, 1), (40, 50), (333, 1), (1, 200), (640, 480), (16383, 100), (300, 65)]


def file_of(image: Image.Image, form: str, **options) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *(("PNG", {}), ("GIF", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"comment": b"x" * 5000})),
        *(("WEBP", {}), ("WEBP", {"lossless": True}), ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"})),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_that_pillow_reads(form, options, size):
    data = file_of(Image.new("RGB", size), form, **options)
    width, height = size
    expected = (height, width) if max(size) <= 200 * min(size) else None
    assert image_size(data) == expected


def test_what_states_no_size_has_none():
    rng = random.Random(0)
    for form in ("PNG", "GIF", "JPEG", "WEBP"):
        data = file_of(Image.new("RGB", (40, 50)), form)
        for cut in range(40):
            assert image_size(data[:cut]) in (None, (50, 40))
        for _ in range(300):
            damaged = bytearray(data)
            for _ in range(9):
                damaged[rng.randrange(len(data))] = rng.randrange(256)
            image_size(bytes(damaged))
    for data in (
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff",
        b"\xff\xd8" + b"\xff" * 99,
        b"RIFF....WEBPabcd" + bytes(30),
        b"BM" + bytes(50),
    ):
        assert image_size(data) is None


def test_an_image_keeps_about_its_size():
    size = DynamicSize(factor=28, min_pixels=3136, max_pixels=100_352)
    assert size.resized(280, 308) == (280, 308)
    assert size.tokens(280, 308) == 110
    assert size.resized(42, 70) == (56, 56)  # halves are rounded to even numbers, as Python does
    for height, width in [(1, 200), (200, 1), (4000, 3000), (30, 3000), (10, 10)]:
        high, wide = size.resized(height, width)
        assert high % 28 == wide % 28 == 0
        assert min(high, wide) >= 28
