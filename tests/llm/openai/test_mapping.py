"""Tests of ``remora_llm.openai.mapping``: what a model is for, seen from its tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig
from remora_llm.openai.mapping import TensorUse, derive_use
from support.engine.fakes import config_of


def config(inputs: str, outputs: str, declared: Any = None) -> ModelConfig:
    """A configuration of names with types, such as ``text_input:STRING seed:UINT64?``."""
    rows = []
    for kind, names in (("input", inputs), ("output", outputs)):
        for each in names.split():
            name, _, datatype = each.partition(":")
            optional = " optional: true" if datatype.endswith("?") else ""
            rows.append(f'{kind} {{ name: "{name}" data_type: TYPE_{datatype.rstrip("?")} dims: 1{optional} }}')
    made = config_of("\n".join(rows))
    if declared is not None:
        made.parameters["openai"].string_value = declared if isinstance(declared, str) else json.dumps(declared)
    return made


@pytest.mark.parametrize(
    ("inputs", "outputs", "use"),
    [
        (
            "text_input:STRING stream:BOOL? sampling_parameters:STRING?",
            "text_output:STRING finish_reason:STRING",
            TensorUse("text", "text_input", "text_output"),
        ),
        (
            "text_input:STRING max_tokens:INT32 random_seed:UINT64? stop_words:STRING?",
            "text_output:STRING cum_log_probs:FP32",
            TensorUse(
                "text",
                "text_input",
                "text_output",
                inputs={"max_tokens": "max_tokens", "seed": "random_seed", "stop": "stop_words"},
            ),
        ),
        ("QUESTION:STRING", "REPLY:STRING", TensorUse("text", "QUESTION", "REPLY")),
        ("messages:STRING", "text_output:STRING", TensorUse("text", "messages", "text_output", messages="messages")),
        ("TEXT:STRING", "EMBEDDING:FP32", TensorUse("embeddings", "TEXT", "EMBEDDING")),
        ("TEXT:STRING", "EMBEDDING:FP32 num_input_tokens:INT32", TensorUse("embeddings", "TEXT", "EMBEDDING")),
        ("input_ids:INT64 attention_mask:INT64", "E:FP32", TensorUse("embeddings", "", "E", tokens="input_ids")),
        (
            "TEXT:STRING? input_ids:INT32? attention_mask:INT32?",
            "E:FP32",
            TensorUse("embeddings", "TEXT", "E", tokens="input_ids"),
        ),
        ("TEXT:STRING input_ids:INT64?", "E:FP32", TensorUse("embeddings", "TEXT", "E")),
        ("TEXT:STRING input_ids:INT64", "E:FP32", None),
        ("IDS:INT64", "E:FP32", None),
        ("Q:STRING D:STRING", "SCORE:FP16", TensorUse("score", "Q", "SCORE", document="D")),
        ("IMAGE:FP32", "LABEL:STRING", None),
        ("TEXT:STRING", "A:FP32 B:FP32", None),
        ("TEXT:STRING", "IDS:INT64", None),
        ("TEXT:STRING IMAGE:FP32", "TEXT:STRING", None),
        ("A:STRING B:STRING C:STRING", "SCORE:FP32", None),
    ],
)
def test_the_use_of_a_model_follows_from_names_and_types(inputs: str, outputs: str, use: TensorUse | None) -> None:
    assert derive_use(config(inputs, outputs)) == use


def test_a_declaration_replaces_what_is_derived() -> None:
    declared = {"tool_parser": "hermes", "inputs": {"seed": "luck"}}
    use = derive_use(config("text_input:STRING luck:INT32?", "text_output:STRING", declared))
    assert use == TensorUse("text", "text_input", "text_output", inputs={"seed": "luck"}, tool_parser="hermes")
    both = derive_use(
        config("A:STRING B:STRING", "X:FP32 Y:FP32", {"task": "score", "prompt": "B", "document": "A", "answer": "Y"})
    )
    assert both == TensorUse("score", "B", "Y", document="A")


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("{", "is not JSON"),
        ([], "must be an object"),
        ({"other": 1}, "must be an object with some of"),
        ({"task": "song"}, "task is 'song'"),
        ({"prompt": "absent"}, "names the input 'absent'"),
        ({"answer": "absent"}, "names the output 'absent'"),
        ({"inputs": {"seed": "absent"}}, "names the input 'absent'"),
        ({"chat_template": 5}, "chat_template must be a text"),
        ({"default_max_tokens": "x"}, "default_max_tokens a whole number"),
    ],
)
def test_a_wrong_declaration_is_an_error_with_the_reason(declared: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        derive_use(config("text_input:STRING", "text_output:STRING", declared))


def test_what_can_neither_be_derived_nor_is_declared_is_named() -> None:
    with pytest.raises(ConfigError, match="answer, prompt"):
        derive_use(config("A:FP32", "B:FP32", {"task": "text"}))
