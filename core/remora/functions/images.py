"""Decoder of images that clients and files contain.

Invariant: only the decoders of `FORMATS` read the bytes. Pillow has others that start programs (EPS) or that few users
test, and would choose them by the first bytes, whatever the name of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

FORMATS = {"BMP": "BMP", "GIF": "GIF", "JPEG": "JPEG", "PNG": "PNG", "TIFF": "TIFF", "WEBP": "WebP"}
"""Names of the formats, by Pillow's names of their decoders."""
MOST_PIXELS = 1 << 26
MOST_SCANS = 100
"""Scans of a JPEG. Each costs the decoder a pass over all pixels, also an empty one of a few bytes."""
_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd8\xff])")
"""Marker of a JPEG that ends entropy-coded data."""
_ADDRESS = re.compile(r"<?[\w.]+ object at 0x[0-9a-fA-F]+>?")
_Result = TypeVar("_Result")


class ImageError(ValueError):
    """Image that cannot be read, with the reason as a clause about the image."""


def decode_image(file: BinaryIO, use: Callable[[Any], _Result]) -> _Result:
    """Return ``use(image)`` for the image in a file.

    Raises ImageError for bytes of other formats, damaged images and those of more than `MOST_PIXELS` or `MOST_SCANS`,
    whatever Pillow raises for them.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=tuple(FORMATS))
        if image.width * image.height > MOST_PIXELS:
            raise ImageError(f"it has {image.width} x {image.height} pixels, more than {MOST_PIXELS}")
        if image.format == "JPEG" and _has_too_many_scans(file):
            raise ImageError(f"it has more than {MOST_SCANS} scans: save it again")
        return use(image)
    except ImageError:
        raise
    except UnidentifiedImageError:
        *others, last = FORMATS.values()
        raise ImageError(f"it is not an image of the format {', '.join(others)} or {last}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"it has more than {MOST_PIXELS} pixels") from None
    except MemoryError:
        raise ImageError("there is not enough memory for its pixels") from None
    except Exception as error:  # decoders of damaged images raise errors of any type
        text = _ADDRESS.sub("its data", str(error)) or type(error).__name__
        raise ImageError(f"it is damaged: {text}") from None


def _has_too_many_scans(file: BinaryIO) -> bool:
    """Return True if a JPEG has more than `MOST_SCANS` before its end."""
    file.seek(0)
    content = file.read()
    scans, at = 0, 0
    while (found := _MARKER.search(content, at)) and found[1] != b"\xd9":
        scans += found[1] == b"\xda"
        at = found.end() + max(int.from_bytes(content[found.end() : found.end() + 2]), 2)
    return scans > MOST_SCANS
