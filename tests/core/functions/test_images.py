"""Images of clients and files: which decoders read them, and that every failure is one error in plain words."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import warnings
import zlib
from typing import Any

import pytest

from remora.functions import images
from remora.functions.images import FORMATS, ImageError, decode_image

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[images]'")


def encoded(kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 8), (200, 100, 50)).save(file, kind, **settings)
    return file.getvalue()


def decoded(data: bytes) -> Any:
    def loaded(image: Any) -> Any:
        image.load()
        return image

    return decode_image(io.BytesIO(data), loaded)


def png_of(width: int, height: int) -> bytes:
    """The head of a PNG file with a size, whose pixels are missing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_named_formats_are_read(kind: str) -> None:
    assert decoded(encoded(kind)).size == (12, 8)


OTHERS = ["PPM", "EPS", "ICO", "PCX", "TGA", "SGI", "PDF", "DDS", "MSP", "XBM", "SPIDER", "JPEG2000", "ICNS"]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_are_refused_and_start_no_program(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("1" if kind in ("MSP", "XBM") else "RGB", (16, 16)).save(file, kind)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ImageError, match=r"^it is not an image of the format BMP, GIF, JPEG, PNG, TIFF or WebP$"):
        decoded(file.getvalue())


@pytest.mark.parametrize("data", [b"", b"text", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n"], ids=str)
def test_bytes_that_are_no_image_are_refused_without_an_address(data: bytes) -> None:
    with pytest.raises(ImageError) as failure:
        decoded(data)
    assert "0x" not in str(failure.value)


@pytest.mark.parametrize("size", [(9000, 9000), (12_000, 12_000), (50_000, 50_000), (2**31 - 1, 2**31 - 1)], ids=str)
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match=f"pixels, more than {images.MOST_PIXELS}$|more than {images.MOST_PIXELS}"):
            decoded(png_of(*size))


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_images_raise_one_error_in_plain_words(kind: str) -> None:
    whole, choice = encoded(kind), random.Random(1)
    texts = []
    for _ in range(300):
        data = bytearray(whole[: choice.randrange(len(whole))] if choice.random() < 0.5 else whole)
        for _ in range(choice.randrange(1, 8)):
            if data:
                data[choice.randrange(len(data))] = choice.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about damaged metadata
            try:
                decoded(bytes(data))
            except ImageError as error:
                texts.append(str(error))
    assert texts
    assert not [text for text in texts if " object at " in text]


def test_a_jpeg_of_many_scans_is_refused_because_each_costs_a_pass_over_all_pixels() -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG", progressive=True, comment=b"\xff\xda" * 200)
    content = file.getvalue()
    assert decoded(content).size == (64, 64)
    last_scan = content[content.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match=r"^it has more than 100 scans: save it again$"):
        decoded(content[:-2] + last_scan * 100 + content[-2:])
