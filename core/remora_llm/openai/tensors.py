"""Conversion between chats or completions and the tensors of an ordinary model. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remora.errors import RemoraError
from remora.messages import Array, Response
from remora_llm.generation.stopping import StopSearch
from remora_llm.generation.tasks import End, EndReason, ParameterError, Piece, Task, Usage
from remora_llm.openai.mapping import COUNT, FILLED_INPUTS, Tensor, TensorUse
from remora_llm.openai.requests import Query

_AS_JSON = "sampling_parameters"
"""Input of Triton's vLLM backend that takes all parameters as JSON."""
_RETURNS = ("finish_reason", COUNT, "num_output_tokens")
_FOR_ALL = ("priority", "user")
"""Parameters of the schedule, which have no meaning for a model with another one."""
_COMPLETION_TOKENS = 16


def task_for(query: Query) -> Task:
    """Return a task that stands for one request to the model.

    Raises:
        ParameterError: no ordinary model can honour the query.
    """
    for name, value in (("n", query.parameters.get("n", 1) != 1), ("return_token_ids", query.token_ids)):
        if value:
            raise ParameterError(name, f"{name} needs a language model that remora runs; this one is called by tensors")
    if query.prompt_scores:
        raise ParameterError("prompt_logprobs", "this model gives no log probabilities")
    if "logprobs" in query.parameters:
        raise ParameterError("logprobs", "this model gives no log probabilities")
    if any(not isinstance(prompt, str) for prompt in query.prompts):
        raise ParameterError("prompt", "this model takes texts, no token ids")
    return Task((0,), 1)


def text_inputs(
    query: Query, prompt: str, use: TensorUse, inputs: Mapping[str, Tensor], *, batched: bool
) -> dict[str, Array]:
    """Return the inputs of one request.

    Args:
        query: the parameters.
        prompt: the prompt, or the messages as JSON for a model that takes them.
        use: of the model's tensors.
        inputs: of the model.
        batched: the model has a batch dimension.

    Raises:
        ParameterError: the model has no input for a parameter.
    """
    takes_messages = query.chat is not None and bool(use.messages)
    values: dict[str, Any] = {use.messages if takes_messages else use.prompt: prompt}
    parameters = {name: value for name, value in query.parameters.items() if name not in _FOR_ALL}
    if _AS_JSON in inputs:
        values[_AS_JSON] = json.dumps(parameters)
    else:
        values |= _single_inputs(parameters, use, inputs, is_chat=query.chat is not None)
    if "stream" in inputs:
        values["stream"] = query.stream
    if "exclude_input_in_output" in inputs:
        values["exclude_input_in_output"] = True
    for name in _RETURNS:
        if f"return_{name}" in inputs:
            values[f"return_{name}"] = True
    if takes_messages and use.prompt != use.messages and not inputs[use.prompt].optional:
        values[use.prompt] = ""
    return {name: _array(value, inputs[name], batched=batched) for name, value in values.items()}


def token_inputs(
    rows: Sequence[Sequence[int]], use: TensorUse, inputs: Mapping[str, Tensor], *, batched: bool
) -> dict[str, Array]:
    """Return the inputs for the token ids of texts.

    The shorter ones of a batch are padded with 0 outside of the mask.

    Raises ParameterError for a number that the model's type cannot hold, and for more tokens than the model takes.
    """
    dtype, longest, fixed = inputs[use.tokens].dtype, max(map(len, rows)), inputs[use.tokens].dims[-1]
    if 0 < fixed < longest:
        raise ParameterError("input", f"a text has {longest} tokens; the model takes at most {fixed}")
    longest = max(longest, fixed)
    most = int(np.iinfo(dtype).max)
    ids = np.zeros((len(rows), longest), dtype)
    filled = {name: np.zeros((len(rows), longest), inputs[name].dtype) for name in FILLED_INPUTS if name in inputs}
    for place, row in enumerate(rows):
        if not 0 <= min(row) <= max(row) <= most:
            raise ParameterError("input", f"token ids must be between 0 and {most}; the text {place} has another one")
        ids[place, : len(row)] = row
        for name, values in filled.items():
            values[place, : len(row)] = FILLED_INPUTS[name]
    whole = batched or len(inputs[use.tokens].dims) > 1
    return {name: values if whole else values[0] for name, values in {use.tokens: ids, **filled}.items()}


def _single_inputs(
    parameters: Mapping[str, Any], use: TensorUse, inputs: Mapping[str, Tensor], *, is_chat: bool
) -> dict[str, Any]:
    values = {}
    for name, value in parameters.items():
        place = use.inputs.get(name)
        if place is not None:
            values[place] = [value] if name == "stop" and isinstance(value, str) else value
        elif name != "stop" and not (name == "n" and value == 1):
            raise ParameterError(name, f"the model has no input for {name}: leave it out")
    limit = use.inputs.get("max_tokens", "")
    if limit and limit not in values and not inputs[limit].optional:
        values[limit] = use.default_max_tokens if is_chat else _COMPLETION_TOKENS
    return values


def _array(value: Any, tensor: Tensor, *, batched: bool) -> Array:
    """Return a value in the shape of an input.

    Unknown dims take the number of its elements.
    """
    elements = value if isinstance(value, list) else [value]
    if tensor.dtype.hasobject:
        flat = np.empty(len(elements), object)
        flat[:] = [str(each).encode() for each in elements]
    else:
        flat = np.array(elements, tensor.dtype)
    dims = [len(elements) if dim < 0 else dim for dim in tensor.dims[-1:]]
    return flat.reshape([1] * (len(tensor.dims) - 1 + batched) + dims)


def stops_of(query: Query, use: TensorUse, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the stop strings that the model does not search itself."""
    stop = query.parameters.get("stop", ())
    if "stop" in use.inputs or _AS_JSON in inputs:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


class TextAnswer:
    """Pieces of one request to a model, from its responses.

    Args:
        task: of the request; see `task_for`.
        use: of the model's tensors.
        stops: searched here, because the model does not search them.
    """

    def __init__(self, task: Task, use: TensorUse, stops: tuple[str, ...]) -> None:
        self._task = task
        self._use = use
        self._search = StopSearch(stops)
        self._reason = "stop"
        self.prompt_tokens = 0
        self.ended = False

    def piece(self, outcome: Response | RemoraError | None, *, final: bool) -> Piece:
        """Return the piece for a response.

        After the end of the answer, pieces are empty.
        """
        if self.ended:
            return Piece(self._task, 0)
        if isinstance(outcome, RemoraError):
            self.ended = True
            return Piece(self._task, 0, end=End("error", Usage(), error=outcome))
        text, count = self._read(outcome) if outcome is not None else ("", 0)
        text = self._search.feed(text)
        tokens = (0,) * count
        if self._search.matched is None and not final:
            return Piece(self._task, 0, tokens, text)
        self.ended = True
        if self._search.matched is None:
            text += self._search.flush()
        reason: EndReason = "length" if self._reason == "length" and self._search.matched is None else "stop"
        return Piece(self._task, 0, tokens, text, end=End(reason, Usage(), self._search.matched))

    def _read(self, response: Response) -> tuple[str, int]:
        """Return a response's text and number of tokens.

        Keeps the number of tokens of the prompt and the reason of the end.
        """
        values = {tensor.name: tensor.data.reshape(-1) for tensor in response.outputs if tensor.data.size}
        if "finish_reason" in values:
            self._reason = _decoded(values["finish_reason"][0])
        if COUNT in values:
            self.prompt_tokens = int(values[COUNT][0])
        count = int(values["num_output_tokens"][0]) if "num_output_tokens" in values else 0
        return (_decoded(values[self._use.answer][0]) if self._use.answer in values else ""), max(count, 0)


def _decoded(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
