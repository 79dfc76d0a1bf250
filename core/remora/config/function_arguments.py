"""Arguments of a function that a model runs, as its configuration describes them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from remora.model_files import FUNCTION, JSON_TENSORS
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.json_text import read_json


class Argument(NamedTuple):
    """An input in the words of the function.

    Attributes:
        hint: the type hint of one value, "" if it has none.
        default: the default value as Python writes it, "" without one.
        example: one element of the tensor, None if no example could be made.
        value: the same for plain JSON.
    """

    hint: str = ""
    default: str = ""
    example: bytes | None = None
    value: Any = None


class FunctionArguments(NamedTuple):
    """Inputs by name, the docstring, and the tensors whose elements are JSON documents."""

    inputs: Mapping[str, Argument] = {}
    doc: str = ""
    documents: frozenset[str] = frozenset()

    def element(self, name: str) -> bytes | None:
        """Return an element of a BYTES input for a generated request.

        Any text is an element of an input without description. Returns None if a JSON document is needed and no example
        is known.
        """
        argument = self.inputs.get(name, Argument())
        return argument.example if argument.example is not None or name in self.documents else b"remora"


NOT_DESCRIBED = FunctionArguments()


def function_arguments(config: ModelConfig) -> FunctionArguments:
    """Return the description in a model's configuration."""
    parameters = config.parameters
    texts = {name: parameters[name].string_value for name in (FUNCTION, JSON_TENSORS) if name in parameters}
    return read_arguments(texts)


def document_names(config: ModelConfig) -> frozenset[str]:
    """Return the names of the inputs and outputs whose elements are JSON documents."""
    parameters = config.parameters  # a map adds what is read
    return _names(parameters[JSON_TENSORS].string_value if JSON_TENSORS in parameters else "")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split(",")) - {""}


def read_arguments(parameters: Mapping[str, str]) -> FunctionArguments:
    """Return the description in the string parameters of a configuration."""
    documents = _names(parameters.get(JSON_TENSORS, ""))
    try:
        document = read_json(parameters.get(FUNCTION) or "{}")
        inputs = {str(name): _argument(row, str(name) in documents) for name, row in document.get("inputs", {}).items()}
        return FunctionArguments(inputs, str(document.get("doc", "")), documents)
    except (ValueError, TypeError, AttributeError, KeyError):  # a parameter of another program
        return FunctionArguments(documents=documents)


def _argument(row: Mapping[str, Any], is_document: bool) -> Argument:
    example, value = None, row.get("example")
    if "example" in row:
        if is_document:
            example = json.dumps(value, ensure_ascii=False).encode()
        elif isinstance(value, dict):
            from base64 import b64decode  # only images need it

            example = b64decode(value["b64"])
    return Argument(str(row.get("hint", "")), str(row.get("default", "")), example, value)
