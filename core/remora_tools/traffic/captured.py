"""Captured requests as JSON lines: their form, the request that repeats one, and the comparison of answers. Pure.

A line has the inputs and outputs as V2 does: numbers and text as JSON in ``data``, what JSON cannot hold exactly as
``base64`` of its bytes on the wire, and ``redacted`` in the place of values that are left out.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "BF16": "<u2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
_LENGTH = struct.Struct("<I")
_FLOATS = ("FP16", "FP32", "FP64")
_EXACT_ONLY = ("BF16", "FP16")


class CapturedError(ValueError):
    """A line that is not a captured request."""


class CapturedTensor(NamedTuple):
    """Tensor of a captured request or answer.

    ``content`` is its bytes on the wire (little-endian; elements of BYTES behind their lengths), None if redacted.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: bytes | None

    def values(self) -> Array:
        """Return the values, flat. Raises ValueError if the content does not fit the datatype."""
        if self.content is None:
            raise ValueError(f"tensor '{self.name}' is redacted")
        if self.datatype == "BYTES":
            return np.array([*elements(self.content), None], object)[:-1]
        return np.frombuffer(self.content, _DTYPES[self.datatype])


class Exchange(NamedTuple):
    """Captured request with its answers, or the error that ended it."""

    model: str
    version: str
    time: str
    id: str
    parameters: Mapping[str, Any]
    inputs: Sequence[CapturedTensor]
    outputs: Sequence[str]
    """Requested outputs; empty for all."""
    answers: Sequence[Sequence[CapturedTensor]]
    error: str
    duration_us: int


class Request(NamedTuple):
    """Body of a V2 request, whose first ``header_length`` bytes are JSON."""

    body: bytes
    header_length: int


def elements(content: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor. Raises ValueError for a length beyond the end."""
    found, at = [], 0
    while at < len(content):
        if at + _LENGTH.size > len(content):
            raise ValueError("a BYTES tensor ends within a length")
        (size,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + size
        if at > len(content):
            raise ValueError("a BYTES tensor ends within an element")
        found.append(content[at - size : at])
    return found


def line_of(exchange: Exchange) -> bytes:
    """Return an exchange as a line of JSON."""
    document = exchange._asdict() | {
        "inputs": [printed(each) for each in exchange.inputs],
        "answers": [[printed(each) for each in answer] for answer in exchange.answers],
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape") + b"\n"


def exchange_of(line: bytes) -> Exchange:
    """Return the exchange of a line. Raises CapturedError."""
    try:
        document = json.loads(line.decode("utf-8", "surrogateescape"))
        fields = {name: document[name] for name in Exchange._fields}
        fields["inputs"] = [_read(each) for each in fields["inputs"]]
        fields["answers"] = [[_read(each) for each in answer] for answer in fields["answers"]]
        return Exchange(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CapturedError(f"not a captured request: {error}") from error


def request_of(exchange: Exchange) -> Request | None:
    """Return the request that repeats an exchange, None if an input is redacted.

    Answers come in binary form.
    """
    contents = [each.content for each in exchange.inputs]
    if any(content is None for content in contents):
        return None
    header: dict[str, Any] = {
        "parameters": {**exchange.parameters, "binary_data_output": True},
        "inputs": [
            {
                "name": each.name,
                "datatype": each.datatype,
                "shape": each.shape,
                "parameters": {"binary_data_size": len(each.content or b"")},
            }
            for each in exchange.inputs
        ],
    }
    if exchange.id:
        header["id"] = exchange.id
    if exchange.outputs:
        header["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in exchange.outputs]
    text = json.dumps(header).encode()
    return Request(text + b"".join(content or b"" for content in contents), len(text))


def answer_of(body: bytes, header_length: int | None) -> list[CapturedTensor]:
    """Return the outputs of a V2 answer. Raises CapturedError for another body."""
    length = len(body) if header_length is None else header_length
    try:
        outputs, at, found = json.loads(body[:length])["outputs"], length, []
        for output in outputs:
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                found.append(_read(output))
                continue
            found.append(
                CapturedTensor(output["name"], output["datatype"], tuple(output["shape"]), body[at : at + size])
            )
            at += size
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CapturedError(f"not an answer of V2: {error}") from error


def difference(
    before: Sequence[CapturedTensor], after: Sequence[CapturedTensor], relative: float = 0.0, absolute: float = 0.0
) -> str:
    """Return how an answer differs from the captured one, "" if it does not.

    Redacted tensors are compared by shape.

    Floats may differ by ``absolute`` + ``relative`` times the captured value; NaN equals NaN.
    """
    known = {each.name: each for each in after}
    if known.keys() != {each.name for each in before}:
        return f"outputs {sorted(known)} instead of {sorted(each.name for each in before)}"
    for old in before:
        new = known[old.name]
        if (new.datatype, new.shape) != (old.datatype, old.shape):
            return f"output '{old.name}': {new.datatype}{list(new.shape)} instead of {old.datatype}{list(old.shape)}"
        if old.content is None or old.content == new.content:
            continue
        try:
            was, now = old.values(), new.values()
        except ValueError as error:
            return f"output '{old.name}': {error}"
        if was.size != now.size:
            return f"output '{old.name}': {now.size} elements instead of {was.size}"
        if old.datatype in _FLOATS:
            with np.errstate(invalid="ignore"):
                same = np.isclose(now.astype(float), was.astype(float), rtol=relative, atol=absolute, equal_nan=True)
        else:
            same = was == now
        wrong = np.flatnonzero(~same)
        if wrong.size:
            at = int(wrong[0])
            return (
                f"output '{old.name}': {wrong.size} of {was.size} elements differ, first [{at}]: "
                f"{now[at]!s:.40} instead of {was[at]!s:.40}"
            )
    return ""


def printed(tensor: CapturedTensor) -> dict[str, Any]:
    """Return a tensor as it appears in a line."""
    shown: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if tensor.content is None:
        return shown | {"redacted": True}
    if tensor.datatype not in _EXACT_ONLY:
        try:
            if tensor.datatype == "BYTES":
                return shown | {"data": [each.decode() for each in elements(tensor.content)]}
            values = tensor.values()
            if tensor.datatype not in _FLOATS or np.isfinite(values).all():
                return shown | {"data": values.tolist()}
        except (ValueError, KeyError):  # bytes that are not UTF-8, or that do not fit the datatype
            pass
    return shown | {"base64": base64.b64encode(tensor.content).decode()}


def _read(shown: Mapping[str, Any]) -> CapturedTensor:
    name, datatype, shape = str(shown["name"]), str(shown["datatype"]), tuple(int(dim) for dim in shown["shape"])
    content: bytes | None
    if shown.get("redacted"):
        content = None
    elif "base64" in shown:
        content = base64.b64decode(shown["base64"], validate=True)
    elif datatype == "BYTES":
        texts = [text.encode("utf-8", "surrogateescape") for text in _flat(shown["data"])]
        content = b"".join([_LENGTH.pack(len(each)) + each for each in texts])
    else:
        content = np.array(_flat(shown["data"]), _DTYPES[datatype]).tobytes()
    return CapturedTensor(name, datatype, shape, content)


def _flat(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError("data is not an array")
    return [each for value in values for each in (_flat(value) if isinstance(value, list) else [value])]
