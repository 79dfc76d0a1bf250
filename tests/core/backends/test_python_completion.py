"""Configurations that Python models complete, and refusals in Triton's words."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from remora.errors import ConfigError, InternalError
from remora.proto.model_config_pb2 import ModelConfig
from support.models.python_models import HEAD, Models, config_of


def complete(models: Models, body: str, config: str) -> ModelConfig:
    code = HEAD + f"    @staticmethod\n    def auto_complete_config(config):\n{body}"
    code += "    def execute(self, requests):\n        return []\n"
    message = config_of(config)
    models.open(code, message).complete(message)
    return message


def test_a_model_completes_its_configuration(models: Models) -> None:
    config = complete(
        models,
        "        assert config.as_dict()['name'] == 'm'\n"
        "        config.set_max_batch_size(3)\n        config.set_dynamic_batching()\n"
        "        config.add_input({'name': 'A', 'data_type': 'TYPE_INT64', 'dims': [2], 'optional': True})\n"
        "        config.add_output({'name': 'B', 'data_type': 'TYPE_FP32', 'dims': (-1,)})\n"
        "        config.set_model_transaction_policy({'decoupled': False})\n        return config\n",
        'name: "m" backend: "python" output { name: "C" data_type: TYPE_FP32 dims: 1 reshape { shape: [] } }',
    )
    assert text_format.MessageToString(config, as_one_line=True) == text_format.MessageToString(
        config_of(
            'name: "m" backend: "python" max_batch_size: 3 dynamic_batching {} model_transaction_policy {} '
            'input { name: "A" data_type: TYPE_INT64 dims: 2 optional: true } '
            'output { name: "C" data_type: TYPE_FP32 dims: 1 reshape {} } '
            'output { name: "B" data_type: TYPE_FP32 dims: -1 }'
        ),
        as_one_line=True,
    )


CONFIGURED = (
    'name: "m" max_batch_size: 4 input { name: "A" data_type: TYPE_INT32 dims: 2 } output { name: "B" } '
    "sequence_batching {} model_transaction_policy { decoupled: true }"
)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "set_max_batch_size(2)",
            "configuration specified max_batch_size 4, but in auto-complete-config function for model 'm' specified "
            "max_batch_size 2",
        ),
        (
            "set_dynamic_batching()",
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for "
            "model 'm' tries to set scheduling_choice as 'dynamic_batching'",
        ),
        (
            "add_input({'name': 'A', 'data_type': 'TYPE_INT64', 'dims': [2]})",
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'A', model provides "
            "TYPE_INT64",
        ),
        (
            "add_input({'name': 'A', 'data_type': 'TYPE_INT32', 'dims': [3]})",
            "model 'm', tensor 'A': the model expects dims [3] but the model configuration specifies dims [2]",
        ),
        (
            "add_input({'name': 'A', 'data_type': 'TYPE_INT32', 'dims': [2], 'optional': True})",
            "model 'm', tensor 'A': the model expects optional True but the model configuration specifies optional "
            "False",
        ),
        (
            "add_input({'name': 'X', 'data_type': 'TYPE_INT32'})",
            "input 'X' in auto-complete-config function for model 'm' is missing 'dims' property.",
        ),
        (
            "add_input({'dims': [1], 'data_type': 'TYPE_INT32'})",
            "input in auto-complete-config function for model 'm' is missing 'name' property.",
        ),
        (
            "add_input({'name': 'X', 'shape': [1]})",
            "input 'X' in auto-complete-config function for model 'm' contains property other than 'name', "
            "'data_type', 'dims' and 'optional'.",
        ),
        (
            "add_output({'name': 'B', 'data_type': 'TYPE_INT32', 'dims': [3], 'optional': True})",
            "output 'B' in auto-complete-config function for model 'm' contains property other than 'name', "
            "'data_type' and 'dims'.",
        ),
        (
            "set_model_transaction_policy({'decoupled': False})",
            "trying to change decoupled property in auto-complete-config for model 'm', which is already set to "
            "'True'.",
        ),
        (
            "set_model_transaction_policy({'other': False})",
            "model transaction property in auto-complete-config function for model 'm' contains property other than "
            "'decoupled'.",
        ),
    ],
)
def test_a_model_that_contradicts_its_configuration_is_refused_in_tritons_words(
    models: Models, call: str, text: str
) -> None:
    with pytest.raises(InternalError) as caught:
        complete(models, f"        config.{call}\n        return config\n", CONFIGURED)
    file = models.root / "m" / "1" / "model.py"
    assert caught.value.message == f"ValueError: {text}\n\nAt:\n  {file}(8): auto_complete_config\n"


def test_what_no_configuration_can_hold_is_refused(models: Models) -> None:
    call = "add_output({'name': 'B', 'data_type': 'TYPE_WRONG', 'dims': [3]})"
    with pytest.raises(ConfigError, match="TYPE_WRONG"):
        complete(models, f"        config.{call}\n        return config\n", CONFIGURED)


def test_a_completion_that_gives_nothing_back_or_fails_is_refused(models: Models) -> None:
    with pytest.raises(InternalError, match=r"must return a valid pb\.ModelConfig"):
        complete(models, "        pass\n", CONFIGURED)
    with pytest.raises(InternalError, match=r"KeyError: 'x'\n\nAt:\n .*model.py\(8\): auto_complete_config\n"):
        complete(models, "        config.as_dict()['x']\n", CONFIGURED)


def test_a_model_without_completion_keeps_its_configuration(models: Models) -> None:
    config = config_of()
    models.open(HEAD + "    def execute(self, requests):\n        return []\n", config).complete(config)
    assert config == config_of()
