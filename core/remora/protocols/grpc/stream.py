"""Messages of ModelStreamInfer and the order in which answers are sent.

Invariant: every request gets exactly one final answer, and requests to models with one answer get theirs in request
order (R11). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from remora.errors import RemoraError
from remora.messages import Buffer, InferForm, Outcome, Response, Streamed
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.infer import FINAL_KEY, encode_streamed
from remora.protocols.grpc.request import parsed
from remora.protocols.grpc.status import STRICT_KEY, utf8
from remora.tensors.shared_memory import Target

_NOWHERE: Mapping[str, Target] = {}


def is_strict(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return True if the client wants a model's error as the status of the stream [R10]."""
    return any(key == STRICT_KEY and value == "true" for key, value in metadata)


def id_of(message: Buffer) -> str:
    """Return the id of a request that could not be decoded.

    Raises MalformedError if it is not a request.
    """
    return parsed(pb.ModelInferRequest, message).id


def encode_refusal(error: RemoraError, request_id: str) -> bytes:
    """Return the answer to a refused request, with nothing but its id [R10, Q05]."""
    response = pb.ModelInferResponse(id=request_id)
    return pb.ModelStreamInferResponse(error_message=utf8(error.message), infer_response=response).SerializeToString()


def final_of(outcome: Outcome) -> Streamed:
    """Return any outcome as one of a stream. A model's only answer is final."""
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
    """Return one answer of a model, or None for an empty final one that was not requested [R12].

    Raises InternalError if the message would be too long.
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
    """Message for the client, if any.

    ``error`` is the model's failure, None for refusals. ``request_bytes`` is the size of the request that a final
    answer completes.
    """

    message: bytes | None
    final: bool
    error: RemoraError | None = None
    request_bytes: int = 0


class Entry:
    """Request of a stream.

    ``in_line`` requests are answered in request order, others as soon as an answer arrives.
    """

    __slots__ = ("ended", "in_line", "opened", "parked", "size")

    def __init__(self, *, in_line: bool) -> None:
        self.in_line = in_line
        self.ended = False
        self.opened = False
        self.size = 0
        """Bytes of the request."""
        self.parked: list[StreamAnswer] = []


class AnswerOrder:
    """Order of a stream's answers. Not thread-safe.

    ``open`` counts the requests without a final answer.
    """

    def __init__(self) -> None:
        self._line: deque[Entry] = deque()
        self.open = 0

    def add(self, entry: Entry) -> None:
        """Add a request."""
        self.open += 1
        if entry.in_line:
            self._line.append(entry)

    def answer(self, entry: Entry, answer: StreamAnswer) -> Sequence[StreamAnswer]:
        """Accept an answer and return those that can be sent now.

        Answers after the final one are dropped.
        """
        if entry.ended:
            return ()
        if answer.final:
            entry.ended = True
            self.open -= 1
        if not entry.in_line:
            return (answer,)
        line = self._line
        if line[0] is not entry:
            entry.parked.append(answer)
            return ()
        if not answer.final:
            return (answer,)
        line.popleft()
        ready = [answer]
        while line:
            first = line[0]
            ready += first.parked
            first.parked = []
            if not first.ended:
                break
            line.popleft()
        return ready
