"""File of JSON lines with a largest size, and tensors that appear there without values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import ENOSPC
from io import FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from remora.api.models import open_private
from remora.errors import ConfigError
from remora.messages import InferForm, Parameter

T = TypeVar("T")
_SECRETS = frozenset(("authorization", "cookie", "proxy-authorization", "x-api-key"))
"""Request headers in lower case that are never kept or copied, should they be forwarded as parameters."""
Redactions = Mapping[str, frozenset[str]]
"""Tensors whose values are left out, by model: an empty set for all of them, "*" for every model."""


def redactions_of(entries: Sequence[str]) -> Redactions:
    """Return the redactions of entries such as ``MODEL:TENSOR,TENSOR``."""
    found: dict[str, frozenset[str]] = {}
    for entry in entries:
        model, _, names = entry.partition(":")
        found[model] = frozenset(filter(None, names.split(",")))
    return found


def hidden_in(redactions: Redactions, model: str) -> Callable[[str], bool]:
    """Return the test whether a tensor of a model appears without its values."""
    names = redactions.get(model, redactions.get("*"))
    return lambda name: names is not None and (not names or name in names)


def hides_all(redactions: Redactions, model: str) -> bool:
    """Return True if all tensors of a model appear without their values."""
    names = redactions.get(model, redactions.get("*"))
    return names is not None and not names


class LineFile(Generic[T]):
    """Destination of lines, for one thread.

    Args:
        path: the file, to which lines are appended.
        most_bytes: its largest size.
        line_of: returns the line of an item.
        full: called when a line does not fit.
        option: name of the option for errors.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(
        self, path: Path, most_bytes: int, line_of: Callable[[T], bytes], full: Callable[[], None], option: str
    ) -> None:
        self._most = most_bytes
        self._line_of = line_of
        self._full = full
        try:
            self._file = FileIO(path, "a", opener=open_private)
        except OSError as error:
            raise ConfigError(f"{option}={path}: cannot be written: {error.strerror}") from error

    def write(self, items: Sequence[T]) -> None:
        """Append lines, none of them in part. Raises OSError."""
        at = end = self._file.seek(0, os.SEEK_END)
        lines = []
        for each in items:
            line = self._line_of(each)
            if end + len(line) > self._most:
                self._full()
                break
            lines.append(line)
            end += len(line)
        try:
            if self._file.write(b"".join(lines)) != end - at:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError:
            with suppress(OSError):
                self._file.truncate(at)  # because a part of a line is not a line
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parameters_of(form: InferForm, *, custom: bool = True) -> dict[str, Parameter]:
    """Return the parameters of a request as V2 writes them.

    Headers that hold secrets are left out. ``custom`` is False for those of the protocol alone.
    """
    parameters = {name: value for name, value in form.parameters.items() if custom and name.lower() not in _SECRETS}
    for name, value in (
        ("priority", form.priority),
        ("timeout", form.timeout_us),
        ("sequence_id", form.sequence_id),
    ):
        if value:
            parameters[name] = value
    if form.sequence_id:
        parameters |= {"sequence_start": form.sequence_start, "sequence_end": form.sequence_end}
    return parameters


def content_of(datatype: str, data: Any) -> bytes:
    """Return a copy of a request's input as its bytes on the wire."""
    if isinstance(data, list):
        return b"".join([len(each).to_bytes(4, "little") + each for each in data])
    return bytes_of(data) if isinstance(data, np.ndarray) else bytes(data)


def bytes_of(data: Any) -> bytes:
    """Return a copy of an array as its bytes on the wire."""
    array = np.asarray(data.host() if hasattr(data, "host") else data)  # DeviceArray, not imported here
    if array.dtype.hasobject:
        items = [each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1).tolist()]
        return b"".join([len(each).to_bytes(4, "little") + each for each in items])
    return np.ascontiguousarray(array).tobytes()


def utc(wall_ms: int) -> str:
    """Return a time as text of ISO 8601."""
    from datetime import UTC, datetime  # imported here because these files are usually off

    return datetime.fromtimestamp(wall_ms / 1e3, UTC).isoformat(timespec="milliseconds")
