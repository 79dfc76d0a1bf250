"""Instance that runs tasks for V2 requests with the tensors of Triton's vLLM backend.

Each instance serves one request at a time and waits for a client that does not read; the engine and the other instances
go on meanwhile, and the text that piles up is sent in one response.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from remora.api.backends import GpuHealth, GpuInstance
from remora.backends import Capabilities, Execution, Instance, Placement
from remora.errors import CancelledError, ConfigError, InternalError, InvalidArgumentError, RemoraError
from remora.messages import Array, Request, Response, Streamed, Tensor
from remora.proto.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup
from remora.system.clock import SystemClock
from remora.system.json_text import read_json
from remora_llm.generation import Generation, Sink
from remora_llm.generation.measurements import TracedSink
from remora_llm.generation.parameters import parse_parameters
from remora_llm.generation.tasks import End, Piece, Task, TokenLogprob

PROMPT = "text_input"
INPUTS = {
    PROMPT: "TYPE_STRING",
    "stream": "TYPE_BOOL",
    "sampling_parameters": "TYPE_STRING",
    "exclude_input_in_output": "TYPE_BOOL",
    "return_finish_reason": "TYPE_BOOL",
    "return_cumulative_logprob": "TYPE_BOOL",
    "return_logprobs": "TYPE_BOOL",
    "return_num_input_tokens": "TYPE_BOOL",
    "return_num_output_tokens": "TYPE_BOOL",
}
"""Inputs and their types; all but the first are optional."""
OUTPUTS = {
    "text_output": ("TYPE_STRING", -1),
    "finish_reason": ("TYPE_STRING", -1),
    "cumulative_logprob": ("TYPE_FP32", -1),
    "logprobs": ("TYPE_STRING", -1),
    "num_input_tokens": ("TYPE_UINT32", 1),
    "num_output_tokens": ("TYPE_UINT32", -1),
}
"""Outputs with their types and dims."""

_PARAMETER_LIMIT = 1 << 20
_STEPS_BEFORE_JOINING = 16


def complete_config(config: ModelConfig, sequences: int = 0) -> None:
    """Add the tensors of Triton's vLLM backend that ``config`` omits, and the instances.

    Args:
        config: the model's configuration, which is completed in place.
        sequences: running answers; twice as many V2 requests are answered at once. 0 keeps the configured instances.

    Raises:
        ConfigError: the configuration contradicts them.
    """
    if config.max_batch_size:
        raise ConfigError(
            f"model '{config.name}': max_batch_size is {config.max_batch_size}; a language model batches by "
            "itself: remove it and set the parameter max_sequences"
        )
    config.model_transaction_policy.decoupled = True
    declared = {row.name: row for row in config.input}
    for name, kind in INPUTS.items():
        if name not in declared:
            config.input.add(name=name, data_type=DataType.Value(kind), dims=[1], optional=name != PROMPT)
    for row in config.input:
        if row.name not in INPUTS or row.data_type != DataType.Value(INPUTS[row.name]):
            raise ConfigError(f"model '{config.name}': input '{row.name}' is not one of {', '.join(INPUTS)}")
    outputs = {row.name for row in config.output}
    for name, (kind, dim) in OUTPUTS.items():
        if name not in outputs:
            config.output.add(name=name, data_type=DataType.Value(kind), dims=[dim])
    for out in config.output:
        if out.name not in OUTPUTS or out.data_type != DataType.Value(OUTPUTS[out.name][0]):
            raise ConfigError(f"model '{config.name}': output '{out.name}' is not one of {', '.join(OUTPUTS)}")
    for group in config.instance_group if sequences else ():
        group.count = 2 * sequences
        group.kind = ModelInstanceGroup.KIND_CPU
        del group.gpus[:]


class Asked(NamedTuple):
    """Meaning of one request."""

    task: Task
    stream: bool
    prefix: str
    """Text that precedes the answer: the prompt, unless it is excluded."""
    outputs: frozenset[str]


def parse_request(request: Request, generation: Generation, seed: int, received_ns: int) -> Asked:
    """Return what a request asks for. ``received_ns`` is the time at which its turn came.

    Raises:
        InvalidArgumentError: an input has more than one element, or a parameter is wrong.
    """
    prompt = _text(request.inputs, PROMPT)
    stream = _flag(request.inputs, "stream", default=False)
    exclude = _flag(request.inputs, "exclude_input_in_output", default=stream)
    if stream and not exclude:
        raise InvalidArgumentError("When streaming, `exclude_input_in_output` = False is not allowed.")
    text = _text(request.inputs, "sampling_parameters") if "sampling_parameters" in request.inputs else "{}"
    if len(text) > _PARAMETER_LIMIT:
        raise InvalidArgumentError(f"sampling_parameters has more than {_PARAMETER_LIMIT} characters")
    try:
        parameters = read_json(text or "{}")
    except ValueError as error:
        raise InvalidArgumentError(f"sampling_parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InvalidArgumentError("sampling_parameters must be a JSON object")
    tokens = generation.tokens.encode(prompt, most=generation.engine.facts.context)
    room = generation.engine.facts.context - len(tokens)
    task = replace(
        parse_parameters(parameters, tokens, seed=seed, room=room),
        id=request.form.id,
        caller=request.caller,
        received_ns=received_ns,
    )
    outputs = {name for name in request.requested if name == "text_output" or _returns(request.inputs, name)}
    return Asked(task, stream, "" if exclude else prompt, frozenset(outputs))


def _returns(inputs: Mapping[str, Array], output: str) -> bool:
    return _flag(inputs, f"return_{output}", default=False)


def _text(inputs: Mapping[str, Array], name: str) -> str:
    value = _single(inputs, name)
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from error


def _flag(inputs: Mapping[str, Array], name: str, *, default: bool) -> bool:
    return bool(_single(inputs, name)) if name in inputs else default


def _single(inputs: Mapping[str, Array], name: str) -> Any:
    array = inputs[name]
    if array.size != 1:
        raise InvalidArgumentError(f"input '{name}' has {array.size} elements; it must have one")
    return array.reshape(-1)[0]


class _PieceQueue:
    """Sink of one request: keeps pieces until the instance's thread takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: list[Sequence[Piece]] = []

    def take(self, pieces: Sequence[Piece]) -> None:
        """Keep the pieces."""
        with self._changed:
            self._steps.append(pieces)
            self._changed.notify()

    def wait(self) -> list[Sequence[Piece]]:
        """Return the new pieces by step, waiting for the first.

        For a slow client, the steps are joined to one."""
        with self._changed:
            while not self._steps:
                self._changed.wait()
            steps, self._steps = self._steps, []
        if len(steps) > _STEPS_BEFORE_JOINING:
            return [[piece for step in steps for piece in step]]
        return steps


class Answers:
    """Responses made of the pieces of one task. Pure.

    Args:
        asked: the request.
        show: returns the text of a token, for log probabilities.
    """

    def __init__(self, asked: Asked, show: Callable[[int], str]) -> None:
        self._asked = asked
        self._show = show
        count = asked.task.choices
        self._texts = [asked.prefix] * count
        self._counts = [0] * count
        self._scores: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._cumulative = [0.0] * count
        self._ends: list[End | None] = [None] * count

    @property
    def error(self) -> RemoraError | None:
        """The error that the request ends with, if any."""
        for end in self._ends:
            if end is not None and end.reason == "cancelled":
                return CancelledError("request was cancelled")
            if end is not None and end.error is not None:
                return end.error
        return None

    @property
    def done(self) -> bool:
        """True if all choices have ended."""
        return all(end is not None for end in self._ends)

    def add(self, pieces: Sequence[Piece]) -> Response | None:
        """Return the response to send after these pieces, or None."""
        for piece in pieces:
            choice = piece.choice
            self._texts[choice] += piece.text
            self._counts[choice] += len(piece.tokens)
            self._scores[choice] += piece.logprobs
            self._cumulative[choice] += sum(score.logprob for score in piece.logprobs)
            self._ends[choice] = piece.end or self._ends[choice]
        if not self._asked.stream and not self.done:
            return None
        if not self.done and not any(self._texts) and not any(self._counts):
            return None
        response = self._response()
        self._texts = [""] * len(self._texts)
        self._counts = [0] * len(self._counts)
        self._scores = [[] for _ in self._scores]
        return response

    def _response(self) -> Response:
        outputs = []
        values: dict[str, Callable[[], Array]] = {
            "text_output": lambda: _bytes(self._texts),
            "finish_reason": lambda: _bytes([_reason(end) for end in self._ends]),
            "cumulative_logprob": lambda: np.array(self._cumulative, np.float32),
            "logprobs": lambda: _bytes([self._logprobs(scores) for scores in self._scores]),
            "num_input_tokens": lambda: np.array([len(self._asked.task.prompt)], np.uint32),
            "num_output_tokens": lambda: np.array(self._counts, np.uint32),
        }
        for name, value in values.items():
            if name in self._asked.outputs:
                outputs.append(Tensor(name, OUTPUTS[name][0].removeprefix("TYPE_").replace("STRING", "BYTES"), value()))
        return Response(outputs)

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> str:
        """Return log probabilities as a JSON list with an object for each token, as Triton does."""
        rows = []
        for score in scores:
            ranked = [(token, value, rank) for rank, (token, value) in enumerate(score.top, 1)]
            if all(token != score.token for token, _, _ in ranked):
                ranked.insert(0, (score.token, score.logprob, score.rank))
            rows.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self._show(token)}
                    for token, value, rank in ranked
                }
            )
        return json.dumps(rows if rows else None)


def _reason(end: End | None) -> str:
    """Return a finish reason, the text ``None`` for an answer that goes on, as Triton does."""
    if end is None:
        return "None"
    return "length" if end.reason == "deadline" else end.reason


def _bytes(texts: Sequence[str]) -> Array:
    array = np.empty(len(texts), object)
    array[:] = [text.encode("utf-8", "replace") for text in texts]
    return array


def open_instance(
    placement: Placement,
    config: ModelConfig,
    generation: Generation,
    trouble: Callable[[], str],
    health: GpuHealth | None = None,
) -> Instance:
    """Return a place for one V2 request, with random seeds and the system's clock.

    See `TensorInstance`. ``health`` is that of the engine's GPU, None if the engine does not use one in this process.
    """
    now_ns = SystemClock().monotonic_ns
    made = TensorInstance(placement.name, config.name, generation, lambda: secrets.randbits(63), trouble, now_ns)
    return made if health is None else GpuInstance(made, health)


class TensorInstance:
    """One place for a V2 request to a language model.

    Args:
        name: of the instance.
        model: name of the model, for traces.
        generation: of the model.
        make_seed: returns a seed for requests without one.
        trouble: returns why the engine cannot run, "" if it can.
        now_ns: the engine's clock.
    """

    quick = False

    def __init__(
        self,
        name: str,
        model: str,
        generation: Generation,
        make_seed: Callable[[], int],
        trouble: Callable[[], str],
        now_ns: Callable[[], int],
    ) -> None:
        self.name = name
        self._model = model
        self._now = now_ns
        self._generation = generation
        self._make_seed = make_seed
        self.capabilities = Capabilities(unhealthy_reason=trouble)

    def execute(self, execution: Execution) -> Sequence[RemoraError | None]:
        """Answer the requests of the batch, one after the other."""
        return [self._answer(execution, index) for index in range(len(execution.requests))]

    def _answer(self, execution: Execution, index: int) -> RemoraError | None:
        request = execution.requests[index]
        engine = self._generation.engine
        try:
            asked = parse_request(request, self._generation, self._make_seed(), self._now())
            queue = _PieceQueue()
            sink: Sink = queue
            if request.trace is not None:
                sink = TracedSink(queue, asked.task, self._model, "text_completion", request.trace, self._now)
            engine.begin(asked.task, sink)
        except RemoraError as error:
            return error
        except Exception as error:  # a fault here must not take the instance's thread along
            return InternalError(f"the request could not be begun: {type(error).__name__}: {error}", from_model=True)
        forget = request.when_cancelled(lambda: engine.cancel(asked.task))
        try:
            answers = Answers(
                asked, lambda token: self._generation.tokens.token_bytes(token).decode("utf-8", "replace")
            )
            while not answers.done:
                for pieces in queue.wait():
                    response = answers.add(pieces)
                    if answers.error is not None:
                        engine.cancel(asked.task)  # the other choices
                        return answers.error
                    if response is not None:
                        execution.send(index, Streamed(response, answers.done))
            return None
        finally:
            forget()

    def close(self) -> None:
        """Do nothing, because the model closes the engine."""
