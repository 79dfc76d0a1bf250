"""Reader of images as rows, resized and laid out for a model's input."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from remora.api.functions import decode_image
from remora.api.system import usable_cpus
from remora.calls import ModelInfo
from remora.errors import InvalidArgumentError, UnsupportedError
from remora.messages import Array
from remora.system.install_advice import install_command
from remora_tools.scoring import CHUNK_BYTES, Chunk, Refusal, Values
from remora_tools.scoring.image_files import MOST_FILE_BYTES, ImageFiles, ReadAhead

PATH_COLUMN, IMAGE_COLUMN = "path", "image"
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_PIXELS_PER_BYTE = 10
"""Compression of a photo in a JPEG file."""


class Pixels(NamedTuple):
    """Form of the images for an input.

    The values are ``(pixel * scale - mean) / deviation`` with pixels of 0 to 255, and ``mean`` and ``deviation`` for
    each channel.

    Attributes:
        input: name of the input.
        shape: of one image; empty for the bytes of the file.
        channel_axis: axis of the channels in ``shape``.
        floats: True if the values are FP32, False for UINT8.
    """

    input: str
    shape: tuple[int, ...] = ()
    channel_axis: int = 0
    floats: bool = False
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.shape[self.channel_axis]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, -1 for that of the file."""
        height, width = (size for axis, size in enumerate(self.shape) if axis != self.channel_axis)
        return height, width

    def row_bytes(self, file_bytes: int) -> int:
        """Return the bytes of an image and its file, estimated if the shape has variable sizes."""
        if not self.shape:
            return file_bytes
        item = 4 if self.floats else 1
        if -1 in self.shape:
            return file_bytes * (1 + _PIXELS_PER_BYTE * item)
        return file_bytes + math.prod(self.shape) * item


def pixels_of(
    info: ModelInfo,
    name: str,
    *,
    batches: bool,
    scale: float,
    mean: Sequence[float],
    deviation: Sequence[float],
) -> Pixels:
    """Return the form of images for the input ``name``, or for the only input.

    Raises InvalidArgumentError for an input that takes no images.
    """
    found = [tensor for tensor in info.inputs if name in ("", tensor.name)]
    if len(found) != 1:
        names = ", ".join(tensor.name for tensor in info.inputs)
        raise InvalidArgumentError(f"choose the input of the images with --column INPUT={IMAGE_COLUMN}: {names}")
    tensor = found[0]
    shape = tuple(tensor.shape[1:] if batches else tensor.shape)
    if tensor.datatype == "BYTES":
        return Pixels(tensor.name)
    axis = next((axis for axis in (0, -1) if len(shape) == 3 and shape[axis] in _MODES), None)
    if axis is None:
        raise InvalidArgumentError(
            f"input '{tensor.name}' has the shape {list(shape)}: images need three dimensions, the first or the last "
            "of 1, 3 or 4 channels"
        )
    floats = tensor.datatype != "UINT8"
    channels = shape[axis]
    for option, values in (("--pixel-mean", mean), ("--pixel-std", deviation)):
        if len(values) not in (0, 1, channels):
            raise InvalidArgumentError(f"{option}: expected 1 or {channels} numbers, got {len(values)}")
    if not floats and (scale != 1 or mean or deviation):
        raise InvalidArgumentError(f"input '{tensor.name}' is UINT8, whose pixels are neither scaled nor shifted")
    if not math.isfinite(scale) or any(not math.isfinite(value) or value == 0 for value in deviation):
        raise InvalidArgumentError("--pixel-scale and --pixel-std: expected finite numbers, and no deviation of 0")
    return Pixels(tensor.name, shape, axis % 3, floats, scale, tuple(mean), tuple(deviation))


class ImageSource:
    """Images in the order of their paths, decoded on all processors.

    ``pixels`` is the form of the images. Raises UnsupportedError without Pillow.
    """

    columns: Sequence[str] = (PATH_COLUMN, IMAGE_COLUMN)

    def __init__(self, files: ImageFiles, pixels: Pixels) -> None:
        if pixels.shape:
            _check_pillow()
        self.pixels = pixels
        self._files = files
        self._ahead = ReadAhead(self._files)
        self._processors = threading.BoundedSemaphore(usable_cpus())
        self._row = 0

    @cached_property
    def etag(self) -> str:
        """Digest of the names and versions of the files."""
        whole = hashlib.sha256(repr(self.pixels).encode())
        for name in self._files.names:
            whole.update(f"{name}\0{self._files.version(name)}\0".encode())
        return whole.hexdigest()

    def chunks(self, first: int, wanted: Sequence[str], size: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        names = self._files.names
        results = self._ahead.results(names[first:], self._read, self.pixels.row_bytes)
        row = first
        while row < len(names):
            numbers, images, kept, refused, held = [], [], [], [], 0
            for number, (name, image) in enumerate(islice(results, size), row):
                row = number + 1
                try:
                    images.append(image.result())
                except (OSError, ValueError, MemoryError) as error:
                    refused.append(Refusal(number, f"the image cannot be read: {error}", {PATH_COLUMN: name}))
                    continue
                numbers.append(number)
                kept.append(name)
                held += images[-1].nbytes if isinstance(images[-1], np.ndarray) else len(images[-1])
                if held >= most_bytes:
                    break
            self._row = row
            columns: dict[str, Values] = {PATH_COLUMN: kept, IMAGE_COLUMN: _stacked(images)}
            yield Chunk(np.array(numbers, np.int64), {name: columns[name] for name in wanted}, refused, row)

    def _read(self, name: str) -> Any:
        """Return an image as an array, or its bytes. Raises ValueError and what the files do."""
        if self._files.size(name) > MOST_FILE_BYTES:
            raise ValueError(f"the file has more than {MOST_FILE_BYTES} bytes")
        with self._files.open(name) as file:
            if not self.pixels.shape:
                return file.read()
            with self._processors:
                return self._decoded(file)

    def _decoded(self, file: BinaryIO) -> Array:
        pixels = self.pixels
        array = decode_image(file, partial(_resized, pixels=pixels))
        array = array.reshape(*array.shape[:2], -1)
        if pixels.floats:
            array = array.astype(np.float32) * np.float32(pixels.scale)
            if pixels.mean:
                array = array - np.array(pixels.mean, np.float32)
            if pixels.deviation:
                array = array / np.array(pixels.deviation, np.float32)
        return array.transpose(2, 0, 1) if pixels.channel_axis == 0 else array

    def fraction(self) -> float:
        return self._row / len(self._files.names)

    def close(self) -> None:
        self._ahead.close()


def _resized(image: Any, pixels: Pixels) -> Array:
    """Return an open image of Pillow with the size and channels of the input."""
    from PIL import Image

    height, width = pixels.size
    wanted = (image.width if width < 0 else width, image.height if height < 0 else height)
    image.draft(_MODES[pixels.channels], wanted)  # a JPEG is decoded at a fraction of its size
    converted = image.convert(_MODES[pixels.channels])
    if converted.size != wanted:
        converted = converted.resize(wanted, Image.Resampling.BILINEAR)
    array: Array = np.asarray(converted)
    return array


def _stacked(images: list[Any]) -> Values:
    """Return images of one shape as one array, others as a list."""
    if images and isinstance(images[0], np.ndarray) and len({image.shape for image in images}) == 1:
        return np.stack(images)
    return images


def _check_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            f"images need Pillow, which is not installed. Install it with: {install_command('images')}"
        ) from None
