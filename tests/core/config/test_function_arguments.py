"""Arguments of functions in the parameters of configurations."""

from __future__ import annotations

import json

import pytest

from remora.config.function_arguments import FunctionArguments, document_names, function_arguments, read_arguments
from support.engine.fakes import config_of

WORDS = {"doc": "Add.", "inputs": {"a": {"hint": "int", "default": "1"}, "b": {"hint": "dict", "example": {"c": 1}}}}


def test_a_configuration_describes_the_arguments_of_its_function() -> None:
    config = config_of('name: "m"')
    config.parameters["FUNCTION"].string_value = json.dumps(WORDS)
    config.parameters["JSON_TENSORS"].string_value = "b,answer"
    found = function_arguments(config)
    assert (found.doc, found.documents, document_names(config)) == ("Add.", {"b", "answer"}, {"b", "answer"})
    assert found.inputs["a"].hint == "int"
    assert (found.element("a"), found.element("b"), found.element("answer")) == (b"remora", b'{"c": 1}', None)
    assert function_arguments(config_of('name: "m"')) == FunctionArguments()


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", '{"inputs": []}', '{"inputs": {"a": 1}}', '{"inputs": {"a": {"example": {"url": ""}}}}']
)
def test_a_parameter_of_another_program_describes_nothing(text: str) -> None:
    assert read_arguments({"FUNCTION": text, "JSON_TENSORS": "b"}) == FunctionArguments(documents=frozenset("b"))
