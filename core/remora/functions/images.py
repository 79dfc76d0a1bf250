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
_ADDRESS = re.compile(r"<?[\w.]+ object at 0x[0-9a-fA-F]+>?")
_Result = TypeVar("_Result")


class ImageError(ValueError):
    """Image that cannot be read, with the reason as a clause about the image."""


def decode_image(file: BinaryIO, use: Callable[[Any], _Result]) -> _Result:
    """Return ``use(image)`` for the image in a file.

    Raises ImageError for bytes of other formats, damaged images and those of more than `MOST_PIXELS`, whatever Pillow
    raises for them.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=tuple(FORMATS))
        if image.width * image.height > MOST_PIXELS:
            raise ImageError(f"it has {image.width} x {image.height} pixels, more than {MOST_PIXELS}")
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
