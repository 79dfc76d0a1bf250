"""Check that the files that an ONNX file names are in its folder.

The check runs before a runtime reads the file.

Tensors name files with their values, and nodes of type EPContext name files with graphs that an execution provider has
compiled. Old versions of ONNX Runtime read whatever path a tensor names, and take a certain location for an address in
memory; which paths of an EPContext are read is the choice of each execution provider. The check reads the structure of
the file and skips its weights.

Invariant: each tensor and node of the file is checked, also those of subgraphs, functions, attributes and sparse
tensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from remora.errors import InvalidArgumentError
from remora.model_files import leaves_folder

Bytes = mmap.mmap | bytes
_LOCATION = b"location"
_CONTEXT = b"EPContext"
_CONTEXT_FILE, _MODEL_FILE, _EMBEDDED = "ep_cache_context", "onnx_model_filename", "embed_mode"
"""Attributes of an EPContext: its content or the path of a file with it, the path of a model, and which of the two."""
_MEMORY_MARK = "*/_ORT_"
"""Begin of the locations by which ONNX Runtime marks tensors in its own memory."""
_DEEPEST = 100
"""Nesting that protobuf reads."""
_MOST_FIELDS = 1 << 24
_VARINT, _FIXED64, _BYTES, _BEGIN_GROUP, _END_GROUP, _FIXED32 = range(6)

_INNER: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {},
}
"""Messages in messages of onnx.proto, by the number of their field."""
_TENSOR_NAME, _ENTRY_KEY, _ENTRY_VALUE = 8, 1, 2
_NODE_NAME, _NODE_TYPE, _NODE_ATTRIBUTE = 3, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER, _ATTRIBUTE_TEXT, _ATTRIBUTE_OF_FUNCTION = 1, 3, 4, 21


class ExternalFile(NamedTuple):
    """File that an ONNX file names.

    Attributes:
        owner: the tensor or node that names it.
        content: the owner's content of the file.
        location: the path.
    """

    owner: str
    content: str
    location: str


def check_external_data(path: Path) -> None:
    """Raise InvalidArgumentError for a tensor or a node with a file outside of the folder.

    Raises OSError for a file that cannot be read. A file that is not ONNX passes, because its runtime explains it.
    """
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for each in external_files(data):
                reason = _reason_against(path, each.location)
                if reason:
                    raise InvalidArgumentError(
                        f"{each.owner} of '{path.name}' has its {each.content} in '{_shown(each.location)}', "
                        f"{reason}: save the file again with its data in the same folder"
                    )


def _shown(location: str) -> str:
    return location if len(location) <= 200 else f"{location[:200]}..."


def _reason_against(path: Path, location: str) -> str:
    """Return why a location is refused, or "" for a file in the model's folder.

    A model and its data may be links into one other folder, as in the cache of Hugging Face.
    """
    if location.startswith(_MEMORY_MARK):
        return "which is an address in memory"
    if "\0" in location:
        return "which is not a path"
    if leaves_folder(location):
        return "which is outside of the model's folder"
    target = (path.parent / location).resolve()
    if any(target.is_relative_to(folder) for folder in (path.parent.resolve(), path.resolve().parent)):
        return ""
    return "which is a link out of the model's folder"


def external_files(data: Bytes) -> Iterator[ExternalFile]:
    """Yield the files that an ONNX file names, as far as it can be read.

    Raises InvalidArgumentError for a file that is nested too deeply or has too many parts to check.
    """
    has_contexts = data.find(_CONTEXT) >= 0
    if has_contexts or data.find(_LOCATION) >= 0:  # else, as in most files, no message has to be read
        yield from _Reader(data, has_contexts=has_contexts).files("model", 0, len(data), 0)


class _Attribute(NamedTuple):
    """Attribute of a node, with the places of its texts.

    ``of_function`` is True if the value is that of an attribute of the enclosing function.
    """

    name: str
    integer: int
    of_function: bool
    texts: Sequence[tuple[int, int]]


class _EndError(Exception):
    """Bytes that are not a message."""


class _Reader:
    """Reader of the wire format of protobuf, which skips all that is not named in `_INNER`."""

    def __init__(self, data: Bytes, *, has_contexts: bool) -> None:
        self._data = data
        self._has_contexts = has_contexts
        self._fields = 0

    def files(self, kind: str, start: int, end: int, depth: int) -> Iterator[ExternalFile]:
        """Yield the files that a message and the messages in it name."""
        if depth > _DEEPEST:
            raise InvalidArgumentError(f"the ONNX file has more than {_DEEPEST} graphs and nodes in each other")
        inner = _INNER[kind]
        try:
            if kind == "tensor":
                yield from self._locations(start, end)
                return
            if kind == "node" and self._has_contexts:
                yield from self._contexts(start, end)
            for number, wire, begin, after in self._walk(start, end):
                if wire == _BYTES and number in inner:
                    yield from self.files(inner[number], begin, after, depth + 1)
        except _EndError:  # the runtime refuses the file too
            return

    def _locations(self, start: int, end: int) -> Iterator[ExternalFile]:
        name, locations = "", []
        for number, wire, begin, after in self._walk(start, end):
            if wire == _BYTES and number == _TENSOR_NAME:
                name = self._text(begin, after)
            elif wire == _BYTES and number in _INNER["tensor"]:
                entry = {
                    each: self._text(first, last)
                    for each, kind, first, last in self._walk(begin, after)
                    if kind == _BYTES and each in (_ENTRY_KEY, _ENTRY_VALUE)
                }
                if entry.get(_ENTRY_KEY) == _LOCATION.decode():
                    locations.append(entry.get(_ENTRY_VALUE, ""))
        yield from (ExternalFile(f"tensor '{name}'", "values", location) for location in locations)

    def _contexts(self, start: int, end: int) -> Iterator[ExternalFile]:
        """Yield the files of a node of type EPContext, whatever its domain."""
        fields = [each for each in self._walk(start, end) if each[1] == _BYTES]
        types = ((begin, after) for number, _, begin, after in fields if number == _NODE_TYPE)
        if not any(after - begin == len(_CONTEXT) and self._data[begin:after] == _CONTEXT for begin, after in types):
            return
        name = "".join(self._text(begin, after) for number, _, begin, after in fields if number == _NODE_NAME)
        attributes = [self._attribute(begin, after) for number, _, begin, after in fields if number == _NODE_ATTRIBUTE]
        embedded = all(each.integer == 1 for each in attributes if each.name == _EMBEDDED)
        for each in attributes:
            if each.name != _MODEL_FILE and (each.name != _CONTEXT_FILE or embedded):
                continue
            if each.of_function:
                raise InvalidArgumentError(
                    f"node '{name}' of the ONNX file takes its {each.name} from an attribute of a function, which "
                    "cannot be checked: save the file again without this function"
                )
            content = "model" if each.name == _MODEL_FILE else "compiled graph"
            for begin, after in each.texts:
                yield ExternalFile(f"node '{name}'", content, self._text(begin, after))

    def _attribute(self, start: int, end: int) -> _Attribute:
        name, integer, of_function, texts = "", 0, False, []
        for number, wire, begin, after in self._walk(start, end):
            if wire == _BYTES and number == _ATTRIBUTE_NAME:
                name = self._text(begin, after)
            elif wire == _VARINT and number == _ATTRIBUTE_INTEGER:
                integer, _ = self._varint(begin, after)
            elif wire == _BYTES and number == _ATTRIBUTE_TEXT:
                texts.append((begin, after))  # not read yet, because a compiled graph may be long
            elif wire == _BYTES and number == _ATTRIBUTE_OF_FUNCTION and after > begin:
                of_function = True
        return _Attribute(name, integer, of_function, texts)

    def _text(self, start: int, end: int) -> str:
        return self._data[start:end].decode("utf-8", "surrogateescape")

    def _walk(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield number, wire type, begin and end of the fields of a message. Raises _EndError."""
        at, groups = start, 0
        while at < end:
            self._fields += 1
            if self._fields > _MOST_FIELDS:
                raise InvalidArgumentError(f"the ONNX file has more than {_MOST_FIELDS} fields beside external data")
            key, at = self._varint(at, end)
            number, wire = key >> 3, key & 7
            begin = at
            if wire == _VARINT:
                _, at = self._varint(at, end)
            elif wire == _BYTES:
                size, begin = self._varint(at, end)
                at = begin + size
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
            elif wire in (_BEGIN_GROUP, _END_GROUP):
                groups += 1 if wire == _BEGIN_GROUP else -1
            if wire > _FIXED32 or at > end or groups < 0:
                raise _EndError
            if not groups:  # fields of unknown groups do not belong to the message
                yield number, wire, begin, at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise _EndError
