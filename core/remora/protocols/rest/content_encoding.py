"""Compression of HTTP bodies, with the inflated size bounded [H26, H27]."""

from __future__ import annotations

import re
import zlib

from remora.errors import InvalidArgumentError
from remora.protocols import inflation
from remora.protocols.rest.answer import HttpAnswer, Refusal

_GZIP = 16 + zlib.MAX_WBITS
_DEFLATE = zlib.MAX_WBITS
_EITHER = 32 + zlib.MAX_WBITS
_WEIGHT = rb"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"


def inflate(body: bytes | bytearray | memoryview, encoding: bytes, limit: int) -> bytes | bytearray | memoryview:
    """Return a request body without its Content-Encoding ``encoding``, at most ``limit`` bytes.

    Raises Refusal (501) for an unknown encoding, InvalidArgumentError for a body that is not in it or is too large.
    """
    if encoding in (b"", b"identity"):
        return body
    if encoding not in (b"gzip", b"deflate"):
        raise Refusal(501, "Unsupported compression type", headers=((b"Accept-Encoding", b"gzip, deflate"),))
    if not len(body):
        raise Refusal(400, "nothing to be decompressed")
    name = encoding.decode()
    try:
        plain = inflation.inflate(body, _EITHER, limit)
    except zlib.error as error:
        raise InvalidArgumentError(f"failed to decompress the request body as {name}: {error}") from None
    except inflation.OverLimitError:
        raise InvalidArgumentError(
            f"request body decompressed from {name} exceeds the maximum allowed value of {limit} bytes. "
            "Use --http-max-input-size to increase the limit."
        ) from None
    except inflation.OverRatioError:
        raise InvalidArgumentError(
            f"request body decompressed from {name} is more than {inflation.MOST_RATIO} times as large as its "
            f"{len(body)} bytes. Send it uncompressed."
        ) from None
    if not plain.whole:
        raise InvalidArgumentError(f"failed to decompress the request body as {name}: it ends too early")
    if plain.surplus:
        raise InvalidArgumentError(
            f"failed to decompress the request body as {name}: {plain.surplus} bytes follow its end"
        )
    return plain.data


def choose_encoding(accept: bytes) -> str:
    """Return "gzip", "deflate" or "" (none) for a request's Accept-Encoding [H27].

    The greatest weight wins, the first of equal ones. Names count in lower case only, and ``*`` is not a name.
    """
    best, best_weight = b"identity", 0.0
    for part in accept.split(b","):
        name, weighted, weight_text = part.lstrip(b" ").partition(b";q=")
        if name not in (b"gzip", b"deflate", b"identity"):
            continue
        weight = 1.0
        if weighted:
            number = re.match(_WEIGHT, weight_text)
            if number is None:
                continue
            weight = float(number.group(1))
        if weight > best_weight:
            best, best_weight = name, weight
    return "" if best == b"identity" else best.decode()


def compress(answer: HttpAnswer, encoding: str) -> HttpAnswer:
    """Return the answer in an encoding of `choose_encoding`.

    Errors and empty bodies stay unchanged.
    """
    if not encoding or answer.status != 200 or not any(len(piece) for piece in answer.body):
        return answer
    stream = zlib.compressobj(wbits=_GZIP if encoding == "gzip" else _DEFLATE)
    packed = [stream.compress(piece) for piece in answer.body]
    packed.append(stream.flush())
    headers = (*answer.headers, (b"Content-Encoding", encoding.encode()))
    return HttpAnswer(answer.status, headers, [b"".join(packed)])
