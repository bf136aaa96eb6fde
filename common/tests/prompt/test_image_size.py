"""An image's size by its header: what Pillow says, or nothing."""

import io
import random

import pytest
from PIL import Image, ImageOps

from penstock.prompt.image_size import DynamicSize, TiledSize, TowerCost, image_size, is_turned
from penstock.prompt.images import ImageRules

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


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_quarter_turns_are_those_that_pillow_makes(form, order):
    for orientation in range(9):
        exif = Image.Exif()
        exif.endian = order
        exif[0x10E], exif[0x112] = "a description", orientation
        data = file_of(Image.new("RGB", (30, 20)), form, exif=exif)
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == (20, 30)
        assert is_turned(data) == turned == (orientation >= 5)
    assert is_turned(file_of(Image.new("RGB", (30, 20)), form)) is False


def test_quarter_turns_that_are_written_otherwise_are_not_guessed():
    data = file_of(Image.new("RGB", (30, 20)), "JPEG", xmp=b"<x tiff:Orientation='6'/>")
    assert is_turned(data) is None
    exif = Image.Exif()
    exif[0x112] = 6
    data = file_of(Image.new("RGB", (30, 20)), "WEBP", exif=exif)
    assert is_turned(data[: data.find(b"EXIF") + 20]) is None


def test_tiles_are_counted_as_the_image_is_turned():
    """Rows of tiles have an end each, so that an image on its side has another number of embeddings."""
    size = TiledSize(tile=12, side=2, resolutions=((12, 24), (24, 12), (24, 24)))
    exif = Image.Exif()
    cost = TowerCost(0.5, 0.01)
    rules = ImageRules(token_id=1, tokens=24, size=size, cost=cost)
    upright = rules.counts_of(file_of(Image.new("RGB", (40, 20)), "JPEG"))
    exif[0x112] = 6
    turned = rules.counts_of(file_of(Image.new("RGB", (40, 20)), "JPEG", exif=exif))
    assert (upright, turned) == ((4 + 2 * 5, cost.tokens(144 + 288)), (4 + 4 * 3, cost.tokens(144 + 288)))
    assert cost.tokens(432) == 216 + 1867
    assert rules.counts_of(file_of(Image.new("RGB", (40, 20)), "JPEG", xmp=b"<x tiff:Orientation='6'/>")) is None
    square = rules.counts_of(file_of(Image.new("RGB", (40, 40)), "JPEG", xmp=b"<x tiff:Orientation='6'/>"))
    assert square == (4 + 4 * 5, cost.tokens(144 + 576))


def test_an_image_keeps_about_its_size():
    size = DynamicSize(factor=28, min_pixels=3136, max_pixels=100_352)
    assert size.resized(280, 308) == (280, 308)
    assert size.tokens(280, 308) == 110
    assert size.resized(42, 70) == (56, 56)  # halves are rounded to even numbers, as Python does
    for height, width in [(1, 200), (200, 1), (4000, 3000), (30, 3000), (10, 10)]:
        high, wide = size.resized(height, width)
        assert high % 28 == wide % 28 == 0
        assert min(high, wide) >= 28
