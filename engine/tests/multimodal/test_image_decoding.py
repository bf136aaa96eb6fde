"""Images from strangers: every file becomes upright RGB, or an error that names its part."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.engine.config import ConfigError
from penstock.engine.models.vision.config import QwenTowerConfig
from penstock.engine.multimodal import decode
from penstock.engine.multimodal.clip import MEAN, STD, clip_pixels, read_clip
from penstock.engine.multimodal.decode import MAX_PIXELS, decode_image
from penstock.engine.multimodal.normalization import normalized, read_normalization
from penstock.engine.multimodal.resize import SIGLIP_MEAN, SIGLIP_STD, read_patches, read_square, resized
from penstock.engine.multimodal.settings import TileSettings
from penstock.prompt.data_url import MAX_IMAGE_BYTES, read_data_url
from penstock.prompt.errors import PromptError
from penstock.prompt.image_size import TiledSize
from penstock.prompt.images import image_name

PARAM = "messages[0].content[1].image_url.url"
COLOURS = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)


def file_of(image: Image.Image, form: str = "PNG", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def refusal(data: bytes) -> str:
    with pytest.raises(PromptError) as caught:
        decode_image(data, PARAM)
    assert caught.value.param == PARAM
    assert str(caught.value).startswith(PARAM)
    return str(caught.value)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has a single byte of pixels."""
    chunks = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0"))
    parts = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "JPEG"])
def test_formats_become_rgb(form):
    image = decode_image(file_of(Image.fromarray(COLOURS), form), PARAM)
    assert (image.mode, image.size) == ("RGB", (5, 7))


def test_transparent_images_are_put_on_white_in_bands(monkeypatch):
    """No more than a band holds the interpreter's lock, and none shows in the picture."""
    pixels = np.random.default_rng(1).integers(0, 256, (23, 9, 4), np.uint8)
    image = Image.fromarray(pixels)
    expected = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    composite, bands = Image.alpha_composite, []
    monkeypatch.setattr(Image, "alpha_composite", lambda white, band: bands.append(band.size) or composite(white, band))
    monkeypatch.setattr(decode, "_BAND_PIXELS", 50)
    assert np.array_equal(np.asarray(decode_image(file_of(image), PARAM)), np.asarray(expected))
    assert bands == [(9, 5)] * 4 + [(9, 3)]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_data_says(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: COLOURS,
        2: COLOURS[:, ::-1],
        3: COLOURS[::-1, ::-1],
        4: COLOURS[::-1],
        5: COLOURS.transpose(1, 0, 2),
        6: np.rot90(COLOURS, -1),
        7: COLOURS[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(COLOURS),
    }[orientation]
    image = decode_image(file_of(Image.fromarray(COLOURS), "PNG", exif=exif), PARAM)
    assert np.array_equal(np.asarray(image), upright)


@pytest.mark.req("LIM-12")
def test_an_id_in_exif_data_names_nothing():
    exif = Image.Exif()
    exif[0xA420] = "0123456789abcdef0123456789abcdef"  # ImageUniqueID
    one, other = (file_of(Image.fromarray(colours), "PNG", exif=exif) for colours in (COLOURS, 255 - COLOURS))
    assert {Image.open(io.BytesIO(file)).getexif()[0xA420] for file in (one, other)} == {exif[0xA420]}
    assert image_name(one) != image_name(other), "other pixels"


def test_transparent_pixels_are_white_whatever_their_colour():
    pixels = np.dstack([COLOURS, np.full(COLOURS.shape[:2], 255, np.uint8)])
    pixels[0, 0, 3] = 0
    expected = COLOURS.copy()
    expected[0, 0] = 255
    assert np.array_equal(np.asarray(decode_image(file_of(Image.fromarray(pixels)), PARAM)), expected)
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    decoded = decode_image(file_of(palette, transparency=1), PARAM)
    assert np.asarray(decoded).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_other_colour_spaces_become_rgb():
    grey = np.array([[0, 0x1234, 0xFFFF]], np.uint16)
    assert np.asarray(decode_image(file_of(Image.fromarray(grey)), PARAM))[0, :, 0].tolist() == [0, 0x12, 0xFF]
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = np.asarray(decode_image(file_of(cmyk, "JPEG"), PARAM))[4, 4]
    assert red[0] > 240
    assert red[1:].max() < 15
    bits = Image.fromarray(np.array([[True, False]]))
    assert np.asarray(decode_image(file_of(bits), PARAM))[0, :, 2].tolist() == [255, 0]


def test_damaged_files_are_refused_by_their_part():
    whole = file_of(Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)))
    for data in (whole[: len(whole) // 2], whole[:40], b"", b"GIF89a", b"<svg xmlns='http://www.w3.org/2000/svg'/>"):
        refusal(data)
    for form in ("JPEG", "WEBP", "GIF", "PNG"):
        sound = file_of(Image.fromarray(COLOURS), form)
        for at in range(0, len(sound), max(1, len(sound) // 40)):
            damaged = sound[:at] + bytes([sound[at] ^ 0xFF]) + sound[at + 1 :]
            try:
                assert decode_image(damaged, PARAM).mode == "RGB"
            except PromptError as error:
                assert error.param == PARAM
    tiff = file_of(Image.fromarray(COLOURS), "TIFF")
    assert "is not an image" in refusal(tiff)


def test_sizes_are_refused_before_anything_is_decoded():
    """The files lack their pixels: whoever decoded them would find them damaged."""
    assert f"at most {MAX_PIXELS}" in refusal(png_header(10_000, 10_000))
    assert "pixels" in refusal(png_header(100_000, 100_000))
    assert "200 times" in refusal(png_header(1, 10_000))
    assert "200 times" in refusal(png_header(10_000, 1))
    assert "damaged" in refusal(png_header(100, 100))


def test_data_urls():
    data = file_of(Image.fromarray(COLOURS))
    text = base64.b64encode(data).decode()
    assert read_data_url(f"data:image/png;base64,{text}", PARAM) == data
    assert read_data_url(f"data:image/PNG;charset=x;BASE64,{text}", PARAM) == data
    for url in (f"data:text/html;base64,{text}", f"data:image/png,{text}", "data:image/png;base64", f"data:;base64,{text}"):
        with pytest.raises(PromptError, match="it must be data:image"):
            read_data_url(url, PARAM)
    for url in ("data:image/png;base64,$$$$", "data:image/png;base64,abcde", f"data:image/png;base64,{text[:8]}\n{text[8:]}"):
        with pytest.raises(PromptError, match="not valid base64"):
            read_data_url(url, PARAM)
    large = "A" * (MAX_IMAGE_BYTES * 4 // 3 + 8)
    with pytest.raises(PromptError, match=f"at most {MAX_IMAGE_BYTES}"):
        read_data_url(f"data:image/png;base64,{large}", PARAM)


@pytest.mark.parametrize("size", [(640, 480), (31, 77), (336, 336), (1200, 337), (17, 2000)])
@pytest.mark.parametrize("edge", [30, 45])
def test_clip_pixels_are_those_of_transformers(size, edge):
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (size[1], size[0], 3), np.uint8))
    raw = {"size": {"shortest_edge": edge}, "crop_size": {"height": 30, "width": 30}}
    reference = CLIPImageProcessorPil(**raw)(image, return_tensors="np")["pixel_values"][0]
    pixels = clip_pixels(image, read_clip(raw, 30)).array()
    ours = normalized(pixels, read_normalization(raw, MEAN, STD)).transpose(2, 0, 1)
    assert np.abs(ours - reference).max() < 5e-7


@pytest.mark.parametrize("size", [(640, 480), (31, 77), (896, 896), (1200, 337), (17, 2000)])
def test_square_pixels_are_those_of_transformers(size):
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (size[1], size[0], 3), np.uint8))
    raw = {"size": {"height": 42, "width": 42}}
    reference = Gemma3ImageProcessorPil(**raw)(image, return_tensors="np")["pixel_values"][0]
    pixels = resized(image, read_square(raw, 42)).array()
    ours = normalized(pixels, read_normalization(raw, SIGLIP_MEAN, SIGLIP_STD)).transpose(2, 0, 1)
    assert np.abs(ours - reference).max() < 5e-7


QWEN = QwenTowerConfig(
    hidden_size=48,
    intermediate_size=80,
    num_layers=1,
    num_heads=3,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    window_size=112,
    full_layers=(),
    out_size=64,
)


@pytest.mark.parametrize("size", [(640, 480), (31, 77), (28, 28), (1200, 337), (20, 2000), (13, 9), (199, 1)])
@pytest.mark.parametrize(
    "raw", [{}, {"min_pixels": 784, "max_pixels": 40_000}, {"size": {"shortest_edge": 784, "longest_edge": 90_000}}]
)
def test_patches_are_those_of_transformers(size, raw):
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (size[1], size[0], 3), np.uint8))
    reference = Qwen2VLImageProcessorPil(**raw)(image, return_tensors="np")
    settings = read_patches(raw, QWEN)
    pixels = resized(image, settings).array()
    ours = normalized(pixels, read_normalization(raw, MEAN, STD))
    height, width, _ = ours.shape
    assert reference["image_grid_thw"].tolist() == [[1, height // 14, width // 14]]
    assert settings.size.tokens(size[1], size[0]) == height * width // 784
    squares = ours.reshape(height // 28, 2, 14, width // 28, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    film = np.repeat(squares[:, :, :, :, :, None], 2, axis=5).reshape(height * width // 196, -1)
    assert np.abs(film - reference["pixel_values"]).max() < 5e-7


@pytest.mark.parametrize("size", [(640, 480), (31, 77), (336, 336), (1200, 337), (17, 2000)])
def test_tiles_are_those_of_transformers(size):
    """Margins are black before the normalisation."""
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (size[1], size[0], 3), np.uint8))
    tile, resolutions = 42, [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]]
    raw = {"size": {"shortest_edge": tile}, "crop_size": {"height": tile, "width": tile}, "image_grid_pinpoints": resolutions}
    reference = LlavaNextImageProcessorPil(**raw)(image, return_tensors="np")["pixel_values"][0]
    tiled = TiledSize(tile=tile, side=3, resolutions=tuple((high, wide) for high, wide in resolutions))
    pixels = resized(image, TileSettings(size=tiled, resample=3))
    ours = normalized(pixels.array(), read_normalization(raw, MEAN, STD)).reshape(-1, tile, tile, 3).transpose(0, 3, 1, 2)
    assert pixels.original == (size[1], size[0])
    assert ours.shape == reference.shape
    assert np.abs(ours - reference).max() < 5e-7


def test_a_processor_of_patches_for_another_tower_is_refused():
    for raw, field in (
        ({"patch_size": 16}, "patch_size"),
        ({"merge_size": 1}, "merge_size"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"do_resize": False}, "do_resize"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "min_pixels"),
        ({"max_pixels": "many"}, "max_pixels"),
        ({"min_pixels": 100}, "min_pixels"),
    ):
        with pytest.raises(ConfigError, match=field):
            read_patches(raw, QWEN)


def test_an_image_processor_for_another_tower_is_refused():
    for raw, field in (
        ({"crop_size": 28}, "crop_size"),
        ({"size": {"shortest_edge": 20}}, "size"),
        ({"size": {"longest_edge": 20}}, "size"),
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": False}, "do_center_crop"),
        ({"do_pad": True}, "do_pad"),
    ):
        with pytest.raises(ConfigError, match=field):
            read_clip(raw, 30)
    for raw, field in (({"image_mean": [1, 2]}, "image_mean"), ({"image_std": [1, 0, 1]}, "image_std")):
        with pytest.raises(ConfigError, match=field):
            read_normalization(raw, MEAN, STD)
    plain = read_normalization({"do_normalize": False, "do_rescale": False}, MEAN, STD)
    assert normalized(np.full((1, 1, 3), 200, np.uint8), plain).tolist() == [[[200.0] * 3]]
