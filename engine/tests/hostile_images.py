"""Images and URLs that nobody means well with, drawn by number: each is refused, or has one right reading, or may be either."""

import base64
import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

HOST = "images.example"
"""The one that may be asked."""
Verdict = Literal["refused", "read", "either"]
_LOSSLESS = ("PNG", "WEBP")
_PRIVATE = (
    *("127.0.0.2", "10.0.0.1", "172.16.5.4", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:db8::1", "::127.0.0.1"),
)
_LITERALS = ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "2130706433", "0x7f000001", "0177.0.0.1", "127.1")


class Case(NamedTuple):
    """One of them."""

    kind: str
    url: str
    """As the client sends it; `PORT` stands for the site's port."""
    verdict: Verdict
    upright: np.ndarray | None = None
    """What is read, [height, width, 3]."""
    lossy: bool = False
    body: bytes = b""
    """What the site answers."""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    addresses: tuple[tuple[str, ...], ...] = (("127.0.0.1",),)
    """What HOST resolves to, at the first time, at the second, and so on."""


def base(number: int) -> np.ndarray:
    """A picture in soft colours, so that lossy formats show it."""
    rng = np.random.default_rng(number)
    return np.asarray(Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8)).resize((45, 36), Image.Resampling.BICUBIC))


def draw(number: int) -> Case:
    """The case of that number, always the same."""
    rng = random.Random(f"hostile {number}")
    return rng.choices([make for make, _ in _KINDS], [weight for _, weight in _KINDS])[0](rng)


def file_of(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """The image in a file."""
    data = io.BytesIO()
    image.save(data, form, **({"lossless": True} if form == "WEBP" else {}) | options)
    return data.getvalue()


def _inline(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _sound(rng: random.Random) -> Case:
    upright, form = base(rng.randrange(4)), rng.choice(_LOSSLESS)
    image = Image.fromarray(upright)
    mode = rng.choice(["RGB", "RGBA", "L", "P"])
    if mode == "L":
        image = image.convert("L")
        upright = np.asarray(image.convert("RGB"))
    elif mode == "P":
        image, form = image.quantize(16), "PNG"
        upright = np.asarray(image.convert("RGB"))
    return Case("sound", _inline(file_of(image.convert("RGBA") if mode == "RGBA" else image, form)), "read", upright)


def _turned(rng: random.Random) -> Case:
    stored, orientation, form = base(rng.randrange(4)), rng.randint(1, 8), rng.choice([*_LOSSLESS, "JPEG"])
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(stored),
    }[orientation]
    data = file_of(Image.fromarray(stored), form, exif=exif)
    return Case("turned", _inline(data), "read", np.ascontiguousarray(upright), lossy=form == "JPEG")


def _cmyk(rng: random.Random) -> Case:
    upright = base(rng.randrange(4))
    return Case("cmyk", _inline(file_of(Image.fromarray(upright).convert("CMYK"), "JPEG")), "read", upright, lossy=True)


def _truncated(rng: random.Random) -> Case:
    form = rng.choice(["PNG", "JPEG", "WEBP", "GIF"])
    noise = np.random.default_rng(rng.randrange(99)).integers(0, 256, (40, 40, 3), np.uint8)
    data = file_of(Image.fromarray(noise), form)
    cut = data[: rng.randrange(int(len(data) * 0.9))]
    return Case("truncated", _inline(cut), "either" if form == "GIF" else "refused")


def _flipped(rng: random.Random) -> Case:
    data = bytearray(file_of(Image.fromarray(base(rng.randrange(4))), rng.choice(["PNG", "JPEG", "WEBP", "GIF"])))
    for _ in range(rng.randint(1, 9)):
        data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    return Case("flipped", _inline(bytes(data)), "either")


def png(width: int, height: int, pixels: bytes = b"\0", *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG in grey that says it has this size, whatever it has."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    every = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in every]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _gif(width: int, height: int) -> bytes:
    """A GIF on a canvas of 4 x 4 whose frame says it is larger."""
    return b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x00;"


def _jpeg(width: int, height: int) -> bytes:
    data = bytearray(file_of(Image.new("RGB", (8, 8)), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def _bomb(rng: random.Random) -> Case:
    side = rng.choice([7_100, 10_000, 30_000, 65_000])
    data = rng.choice([png(side, side), _gif(side, side), _jpeg(side, side), png(2**31 - 1, 2**31 - 1), png(0, 7)])
    return Case("bomb", _inline(data), "refused")


def _thin(rng: random.Random) -> Case:
    long = rng.randint(201, 10_000)
    width, height = rng.choice([(1, long), (long, 1), (1, 10_000)])
    return Case("thin", _inline(file_of(Image.new("RGB", (width, height)))), "refused")


def _metadata(rng: random.Random) -> Case:
    """Small data that become large where somebody unpacks them."""
    large = zlib.compress(bytes(2 ** rng.choice([20, 26])))
    chunk = rng.choice([(b"zTXt", b"k\0\0" + large), (b"iCCP", b"k\0\0" + large), (b"iTXt", b"k\0\1\0\0\0" + large)])
    return Case("metadata", _inline(png(8, 8, b"\0" * 72, chunk)), "either")


def _other_file(rng: random.Random) -> Case:
    image = Image.fromarray(base(0))
    data = rng.choice(
        [
            *(b"", b"\0" * 100, rng.randbytes(400), b"%PDF-1.7\n", b"PK\3\4" + bytes(60), b"#!/bin/sh\nexit 1\n"),
            b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
            b"<html><script>1</script></html>",
            *(file_of(image, form) for form in ("TIFF", "BMP", "ICO", "PPM", "TGA", "PCX", "EPS")),
        ]
    )
    return Case("other file", _inline(data, rng.choice(["image/png", "image/svg+xml", "image/jpeg"])), "refused")


def _bad_data_url(rng: random.Random) -> Case:
    text = _inline(file_of(Image.fromarray(base(0))))
    at = rng.randrange(30, len(text))
    url = rng.choice(
        [
            *(text[:at] + "\n" + text[at:], text[:at] + "$" + text[at:], text[: -rng.choice([1, 5])] + "!", text + "=A"),
            *(text.replace("image/png", "text/html"), text.replace(";base64", ""), "data:", "data:,", "data:image/png;base64"),
            *(
                text.replace("data:", "data:image/png;", 1)[:40],
                "data:image/png;base64,",
                "data:image/png;base64," + "\u00e9" * 9,
            ),
        ]
    )
    return Case("bad data url", url, "refused")


def _scheme(rng: random.Random) -> Case:
    some = ["file:///etc/passwd", "http://HOST/a", "ftp://HOST/a", "gopher://HOST/", "javascript:1", "//HOST/a", "HOST/a"]
    others = ["", " ", "https:", "https://", "https:///a", "blob:https://HOST/x", "s3://HOST/a", "\x00", "jar:file:/a!/b"]
    return Case("scheme", rng.choice([*some, *others]).replace("HOST", HOST), "refused")


def _other_host(rng: random.Random) -> Case:
    names = ["localhost", "metadata.google.internal", f"{HOST}.evil.example", f"evil.{HOST}", f"{HOST}\u3002evil.example"]
    odd = [f"{HOST}@127.0.0.1", f"user:pw@{HOST}", f"{HOST}:22", f"{HOST}:99999", f"{HOST}:PORT@evil.example", f"{HOST}%00.evil"]
    return Case("other host", f"https://{rng.choice([*names, *odd, *_LITERALS])}/a.png", "refused")


def _private(rng: random.Random) -> Case:
    addresses = [rng.choice(_PRIVATE)]
    if rng.random() < 0.5:
        addresses.insert(rng.randint(0, 1), "127.0.0.1")
    return _site("private", verdict="refused", addresses=(tuple(addresses),))


def _rebinding(rng: random.Random) -> Case:
    """The name leads elsewhere as soon as it has been checked."""
    return _fetched(rng)._replace(kind="rebinding", addresses=(("127.0.0.1",), (rng.choice(_PRIVATE),)))


def _redirect(rng: random.Random) -> Case:
    to = rng.choice([f"https://{HOST}:PORT/b", "http://169.254.169.254/", "file:///etc/passwd", "//evil.example", "", "/a.png"])
    return _site("redirect", verdict="refused", status=rng.choice([300, 301, 302, 303, 307, 308]), headers=(("location", to),))


def _answer(rng: random.Random) -> Case:
    data = file_of(Image.fromarray(base(0)))
    return rng.choice(
        [
            _site("answer", verdict="refused", status=rng.choice([204, 206, 401, 403, 404, 418, 500, 503]), body=data),
            _site("answer", verdict="refused", body=data, headers=(("content-encoding", rng.choice(["gzip", "br", "x"])),)),
            _site("answer", verdict="refused", body=b"<html>not here</html>"),
            _site("answer", verdict="refused", body=data[: len(data) // 2]),
        ]
    )


def _fetched(rng: random.Random) -> Case:
    upright = base(rng.randrange(4))
    form = rng.choice(_LOSSLESS)
    kind = ("content-type", rng.choice(["image/png", "text/html", "application/x-sh"]))
    return _site("fetched", verdict="read", upright=upright, body=file_of(Image.fromarray(upright), form), headers=(kind,))


def _site(kind: str, **fields: object) -> Case:
    return Case(kind, f"https://{HOST}:PORT/a.png", **fields)  # pyright: ignore[reportArgumentType]


_KINDS: list[tuple[Callable[[random.Random], Case], int]] = [
    *((_sound, 8), (_turned, 10), (_cmyk, 4), (_truncated, 14), (_flipped, 14), (_bomb, 8), (_thin, 5), (_metadata, 3)),
    *((_other_file, 6), (_bad_data_url, 6), (_scheme, 5), (_other_host, 6), (_private, 6), (_rebinding, 3), (_redirect, 4)),
    *((_answer, 4), (_fetched, 4)),
]
