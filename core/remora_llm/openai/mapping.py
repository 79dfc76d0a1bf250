"""Use of an ordinary model's tensors for OpenAI's routes. Pure.

It is derived from the model's configuration, or declared there.
The parameter ``openai`` of a configuration is a JSON object with any field of `TensorUse`. What it omits is derived
from names and types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from remora.errors import ConfigError
from remora.messages import DTYPES
from remora.proto.model_config_pb2 import DataType, ModelConfig

Task = Literal["text", "embeddings", "score"]

_FLOATS = ("FP16", "FP32", "FP64")
_PROMPTS = ("text_input", "prompt", "PROMPT", "TEXT", "text")
_ANSWERS = ("text_output", "TEXT", "text", "response")
_TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "request_output_len"),
    "min_tokens": ("min_tokens", "min_length"),
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "top_k": ("top_k", "runtime_top_k"),
    "min_p": ("min_p",),
    "seed": ("seed", "random_seed"),
    "stop": ("stop_words", "stop"),
    "repetition_penalty": ("repetition_penalty",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
}
"""Inputs by parameter: the names of TensorRT-LLM's models in Triton, and those under which Python models have them."""


COUNT = "num_input_tokens"
"""Output with the number of tokens that a model has read, as Triton's vLLM backend names it."""
_TOKEN_INPUTS = ("input_ids", "token_ids", "tokens")
FILLED_INPUTS: Mapping[str, int] = {"attention_mask": 1, "token_type_ids": 0}
"""Inputs of encoders that go with token ids, by the value of each token."""


class Tensor(NamedTuple):
    """Input or output of a model; ``dims`` are without the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False

    @property
    def dtype(self) -> Any:
        """numpy dtype of its values."""
        return DTYPES[self.datatype]


@dataclass(frozen=True, slots=True)
class TensorUse:
    """Use of a model's tensors.

    Attributes:
        task: what the model does.
        prompt: input for a text; of a score, for the query; "" for a model that takes only tokens.
        document: of a score, input for the text that is compared with the query.
        answer: output with the text, the vector or the score.
        messages: input for the messages of a chat as JSON, instead of a prompt; "" for none.
        chat_template: Jinja template that renders messages as a prompt; "" for none.
        inputs: input of each parameter, by vLLM's names.
        default_max_tokens: sent to a model that needs a limit where the request has none.
        tool_parser: format of tool calls in the text; "" for none.
        tokens: input for the token ids of a text whose vector is wanted; "" for a model that takes only texts.
    """

    task: Task
    prompt: str
    answer: str
    document: str = ""
    messages: str = ""
    chat_template: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    default_max_tokens: int = 256
    tool_parser: str = ""
    tokens: str = ""


def tensors_of(config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs and outputs of a configuration by name."""
    return _tensors(config.input), _tensors(config.output)


def derive_use(config: ModelConfig) -> TensorUse | None:
    """Return how OpenAI's routes use a model, None if they cannot.

    Raises:
        ConfigError: the parameter ``openai`` is wrong.
    """
    inputs, outputs = tensors_of(config)
    derived = _text(inputs, outputs) or _vectors(inputs, outputs)
    declared = config.parameters["openai"].string_value if "openai" in config.parameters else ""
    return _declared(config.name, declared, derived, inputs, outputs) if declared else derived


def _tensors(rows: Any) -> dict[str, Tensor]:
    found = {}
    for row in rows:
        datatype = DataType.Name(row.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
        found[row.name] = Tensor(row.name, datatype, tuple(row.dims), getattr(row, "optional", False))
    return found


def _of_type(rows: Mapping[str, Tensor], *datatypes: str, required: bool = False) -> list[str]:
    return [row.name for row in rows.values() if row.datatype in datatypes and not (required and row.optional)]


def _text(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> TensorUse | None:
    """Return the use of a model that writes text."""
    answer = _one(_of_type(outputs, "BYTES"), _ANSWERS)
    messages = "messages" if "messages" in inputs and inputs["messages"].datatype == "BYTES" else ""
    texts = [name for name in _of_type(inputs, "BYTES", required=True) if name != messages]
    prompt = _one(texts, _PROMPTS) or ("" if texts else messages)
    if not answer or not prompt:
        return None
    taken = {name: next((each for each in names if each in inputs), "") for name, names in _TAKEN_BY.items()}
    use = TensorUse("text", prompt, answer, messages=messages, inputs={name: one for name, one in taken.items() if one})
    known = {prompt, messages, *use.inputs.values()}
    missing = [row.name for row in inputs.values() if not row.optional and row.name not in known | {"stream"}]
    return use if not missing else None


def _vectors(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> TensorUse | None:
    """Return the use of a model that gives a vector or score."""
    texts, numbers = _of_type(inputs, "BYTES"), _of_type(outputs, *_FLOATS)
    tokens = next((name for name in _TOKEN_INPUTS if name in _of_type(inputs, "INT32", "INT64")), "")
    known = {*texts, *((tokens, *FILLED_INPUTS) if tokens else ())}
    if len(numbers) != 1 or set(inputs) - known:
        return None
    if not texts:  # an output with one dimension more has a vector for each token
        is_vector = bool(tokens) and len(outputs[numbers[0]].dims) == len(inputs[tokens].dims)
        return TensorUse("embeddings", "", numbers[0], tokens=tokens) if is_vector else None
    if any(not inputs[name].optional for name in set(inputs) - set(texts)):
        return None  # it needs text and tokens at once
    if len(texts) == 1:
        return TensorUse("embeddings", texts[0], numbers[0], tokens=tokens if inputs[texts[0]].optional else "")
    if len(texts) == 2 and not tokens:
        return TensorUse("score", texts[0], numbers[0], document=texts[1])
    return None


def _one(names: Sequence[str], preferred: Sequence[str]) -> str:
    """Return the only name, or the first preferred one; "" for none."""
    return names[0] if len(names) == 1 else next((name for name in preferred if name in names), "")


def _declared(
    model: str,
    text: str,
    derived: TensorUse | None,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
) -> TensorUse:
    """Return the declared use over the derived one. Raises ConfigError."""
    where = f"model '{model}': parameter 'openai'"
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    known = {each.name: each.type for each in fields(TensorUse)}
    if not isinstance(document, dict) or set(document) - set(known):
        raise ConfigError(f"{where} must be an object with some of {', '.join(known)}")
    values = {each: getattr(derived, each) for each in known} if derived is not None else {}
    values |= document
    missing = {"task", "prompt", "answer"} - set(values)
    if missing:
        raise ConfigError(f"{where} must have {', '.join(sorted(missing))}, which cannot be derived")
    if values["task"] not in ("text", "embeddings", "score"):
        raise ConfigError(f"{where}: task is {values['task']!r}; it must be text, embeddings or score")
    if not isinstance(values.get("inputs", {}), dict) or not isinstance(values.get("default_max_tokens", 1), int):
        raise ConfigError(f"{where}: inputs must be an object, and default_max_tokens a whole number")
    words = [
        name
        for name in known
        if name not in ("inputs", "default_max_tokens") and not isinstance(values.get(name, ""), str)
    ]
    if words:
        raise ConfigError(f"{where}: {words[0]} must be a text")
    use = TensorUse(**values)
    for name in (use.prompt, use.document, use.messages, use.tokens, *use.inputs.values()):
        if name and name not in inputs:
            raise ConfigError(f"{where} names the input {name!r}, which the model lacks")
    if use.answer not in outputs:
        raise ConfigError(f"{where} names the output {use.answer!r}, which the model lacks")
    return use
