"""ModelStreamInfer, the pure part: what the answers of a stream look like and in which order they leave; the law: every
request gets exactly one final answer, and requests to models that give one answer get theirs in request order (R11).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from remora.errors import RemoraError
from remora.messages import Buffer, InferForm, Outcome, Response, Streamed
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.infer import FINAL_KEY, encode_streamed
from remora.protocols.grpc.request import parsed
from remora.protocols.grpc.status import utf8
from remora.tensors.shared_memory import Target

_NOWHERE: Mapping[str, Target] = {}
STRICT_KEY = "triton_grpc_error"


def is_strict(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Does the client want a model's error as the stream's status rather than as a message [R10]?"""
    return any(key == STRICT_KEY and value == "true" for key, value in metadata)


def id_of(message: Buffer) -> str:
    """The id of a request that could not be read further; raises MalformedError when it is none at all."""
    return parsed(pb.ModelInferRequest, message).id


def encode_refusal(error: RemoraError, request_id: str) -> bytes:
    """The answer to a request that was not taken: it carries nothing but the id [R10, Q05]."""
    response = pb.ModelInferResponse(id=request_id)
    return pb.ModelStreamInferResponse(error_message=utf8(error.message), infer_response=response).SerializeToString()


def final_of(outcome: Outcome) -> Streamed:
    """Any outcome as one of a stream: what a model answers with once is final."""
    return outcome if isinstance(outcome, Streamed) else Streamed(outcome, True)


def encode_answer(
    name: str,
    version: str,
    form: InferForm,
    streamed: Streamed,
    *,
    empty_final: bool,
    places: Mapping[str, Target] = _NOWHERE,
) -> bytes | None:
    """One answer of a model; None for a final one that carries nothing and was not asked for [R12].

    Raises InternalError when the message would be too long.
    """
    outcome, final = streamed
    if isinstance(outcome, Response):
        return encode_streamed(name, version, form, outcome, final, places)
    if outcome is None and not empty_final:
        return None
    mark = {FINAL_KEY: pb.InferParameter(bool_param=final)}
    response = pb.ModelInferResponse(model_name=name, id=form.id, parameters=mark)
    text = "" if outcome is None else utf8(outcome.message)
    return pb.ModelStreamInferResponse(error_message=text, infer_response=response).SerializeToString()


class StreamAnswer(NamedTuple):
    """A message for the client, None for none. ``error`` is what a model failed with; refusals have none.

    ``request_bytes`` is the size of the request that a final answer is done with.
    """

    message: bytes | None
    final: bool
    error: RemoraError | None = None
    request_bytes: int = 0


class Entry:
    """One request of a stream. ``in_line`` ones are answered in request order, others whenever there is something."""

    __slots__ = ("ended", "in_line", "parked")

    def __init__(self, *, in_line: bool) -> None:
        self.in_line = in_line
        self.ended = False
        self.parked: list[StreamAnswer] = []


class AnswerOrder:
    """Which answers may leave now. Not thread-safe. ``open`` counts the requests whose final answer has not come."""

    def __init__(self) -> None:
        self._line: deque[Entry] = deque()
        self.open = 0

    def add(self, entry: Entry) -> None:
        """A request has come."""
        self.open += 1
        if entry.in_line:
            self._line.append(entry)

    def answer(self, entry: Entry, answer: StreamAnswer) -> list[StreamAnswer]:
        """An answer has come; gives those that leave now. What comes after the final one is dropped."""
        if entry.ended:
            return []
        entry.ended = answer.final
        self.open -= answer.final
        if not entry.in_line:
            return [answer]
        entry.parked.append(answer)
        leaving: list[StreamAnswer] = []
        while self._line:
            first = self._line[0]
            leaving += first.parked
            first.parked = []
            if not first.ended:
                break
            self._line.popleft()
        return leaving
