"""A request to an ``inference.py`` as a V2 request and back; the law: body, type and accept travel untouched."""

from __future__ import annotations

import orjson

from remora.messages import Buffer
from remora.protocols.rest.answer import HttpAnswer

_NAMES = ("body", "content_type", "accept")
_PREFIX = 4
"""A BYTES element has its length before it, little-endian."""


def script_request(body: Buffer, media: bytes, accept: bytes) -> tuple[bytes, int]:
    """The V2 request for the model that runs the script, and the length of its JSON part in bytes."""
    pieces = [len(piece).to_bytes(_PREFIX, "little") + bytes(piece) for piece in (body, media, accept)]
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(piece)}}
        for name, piece in zip(_NAMES, pieces, strict=True)
    ]
    header = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return b"".join((header, *pieces)), len(header)


def answer_of_script(answer: HttpAnswer) -> HttpAnswer:
    """The script's own body, content type and status out of the model's good answer."""
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
