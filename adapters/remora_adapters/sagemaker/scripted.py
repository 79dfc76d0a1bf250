"""Conversion between requests to an ``inference.py`` and V2.

Body, content type and accept header are passed on unchanged.
"""

from __future__ import annotations

import orjson

from remora.messages import Buffer
from remora.protocols.rest.answer import HttpAnswer

_NAMES = ("body", "content_type", "accept")
_PREFIX = 4
"""Length of the little-endian prefix of a BYTES element."""


def script_request(body: Buffer, media: bytes, accept: bytes) -> tuple[bytes, int]:
    """Return the V2 request for the script's model, and the length of its JSON part."""
    pieces = [len(piece).to_bytes(_PREFIX, "little") + bytes(piece) for piece in (body, media, accept)]
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(piece)}}
        for name, piece in zip(_NAMES, pieces, strict=True)
    ]
    header = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return b"".join((header, *pieces)), len(header)


def answer_of_script(answer: HttpAnswer) -> HttpAnswer:
    """Return the script's body, content type and status from the model's successful answer."""
    length = len(answer.body[0])
    whole = b"".join(answer.body)
    found, at = {}, length
    for output in orjson.loads(whole[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = whole[at : at + size]
        at += size
    status = int.from_bytes(found["status"], "little")
    media = found["content_type"][_PREFIX:].split(b"\r")[0].split(b"\n")[0]
    return HttpAnswer(status, ((b"Content-Type", media),), [found["body"][_PREFIX:]])
