"""What an ONNX model takes and gives, in the wire's words; the law: pure, read once from what a session tells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from remora.config.datatypes import DATATYPE_BY_NAME
from remora.errors import UnsupportedError
from remora.messages import TensorInfo

_DATATYPES = DATATYPE_BY_NAME | {"float": "FP32", "double": "FP64", "string": "BYTES"}
_TENSOR = re.compile(r"tensor\((\w+)\)")
_OPTIONAL = re.compile(r"optional\((.+)\)")
_WITHOUT_ZIPMAP = "; export it without ZipMap: convert_sklearn(..., options={'zipmap': False})"


class OnnxSignature(NamedTuple):
    """A model's tensors in the model's order, with full shapes; an empty shape is a scalar or of unknown rank.

    ``optional`` names the inputs that a request may leave out: those of ONNX's optional type, and ``defaults``, the
    inputs that the model has a value for itself.
    """

    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    defaults: Mapping[str, TensorInfo]
    optional: frozenset[str]

    @property
    def datatypes(self) -> dict[str, str]:
        """The datatype of every input by its name."""
        return {name: info.datatype for name, info in {**self.inputs, **self.defaults}.items()}


def read_signature(model: str, inputs: Iterable[Any], outputs: Iterable[Any], defaults: Iterable[Any]) -> OnnxSignature:
    """From what a session tells of itself: objects with a ``name``, a ``type`` (``"tensor(float)"``) and a ``shape``.

    Raises:
        UnsupportedError: for an input or output that is no tensor, or has no datatype on the wire.
    """
    inputs, defaults = list(inputs), list(defaults)
    optional = {each.name for each in defaults} | {each.name for each in inputs if _OPTIONAL.fullmatch(each.type)}
    return OnnxSignature(
        {each.name: _info(model, "input", each) for each in inputs},
        {each.name: _info(model, "output", each) for each in outputs},
        {each.name: _info(model, "input", each) for each in defaults},
        frozenset(optional),
    )


def _info(model: str, role: str, tensor: Any) -> TensorInfo:
    inner = _OPTIONAL.fullmatch(tensor.type) if role == "input" else None
    match = _TENSOR.fullmatch(inner[1] if inner else tensor.type)
    where = f"model '{model}': {role} '{tensor.name}'"
    if match is None:
        hint = _WITHOUT_ZIPMAP if tensor.type.startswith("seq(map(") else ""
        raise UnsupportedError(f"{where} is {tensor.type}, and only tensors can be served{hint}")
    if match[1] not in _DATATYPES:
        raise UnsupportedError(f"{where} has the ONNX type {match[1]}, for which the protocol has no datatype")
    # A name or nothing stands for a dimension that varies.
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in tensor.shape)
    return TensorInfo(tensor.name, _DATATYPES[match[1]], shape)
