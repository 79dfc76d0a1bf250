"""Requests and outcomes as the items of messages, and back; the law: pure, and each head is written in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from remora.backends.worker import wire
from remora.backends.worker.wire import FINAL, Draft, Item, WireError
from remora.errors import RemoraError, error_of
from remora.messages import InferForm, Outcome, Request, Response, Streamed, Tensor, datatype_of

_REMEMBERED = 512
_NO_OUTCOME = wire.head(none=True)


class RequestWriter:
    """Makes items of requests. The same form with the same shapes has the same head, which is made once."""

    def __init__(self) -> None:
        self._heads: dict[Any, bytes] = {}

    def draft(self, request: Request) -> Draft:
        """The request as an item."""
        arrays = list(request.inputs.values())
        if request.trace is not None:  # no head that comes again
            return Draft(
                _request_head(request, trace=[request.trace.id, request.trace.context]), arrays, request.form.id
            )
        key = (request.form, request.requested, request.rows, tuple([array.shape for array in arrays]))
        head = self._heads.get(key)
        if head is None:
            head = _request_head(request)
            if len(self._heads) >= _REMEMBERED:
                self._heads.clear()
            self._heads[key] = head
        return Draft(head, arrays, request.form.id)


def _request_head(request: Request, **more: Any) -> bytes:
    form = request.form
    return wire.head(
        [(name, datatype_of(array), array.shape) for name, array in request.inputs.items()],
        requested=request.requested,
        rows=request.rows,
        parameters=dict(form.parameters),
        priority=form.priority,
        timeout_us=form.timeout_us,
        sequence=[form.sequence_id, form.sequence_start, form.sequence_end],
        **more,
    )


class TraceMark(NamedTuple):
    """What a worker knows of a request's trace: what its calls are to name, see ``messages.RequestTrace``."""

    id: int
    context: str

    def over(self, model: Any) -> Any:
        """The server follows what is asked of it."""
        return model

    def taken(self, request: Request) -> None:
        """The server has noted that."""


class RequestReader:
    """Makes requests of items; remembers the forms, since most requests look like one before. Not thread-safe."""

    def __init__(self) -> None:
        self._forms: dict[int, _Form] = {}

    def request(self, item: Item) -> Request:
        """The request, its inputs the item's arrays. Raises WireError."""
        head = item.head
        known = self._forms.get(id(head))
        if known is None or known.head is not head:
            known = _form_of(head)
            if len(self._forms) >= _REMEMBERED:
                self._forms.clear()
            self._forms[id(head)] = known
        form = replace(known.form, id=item.id) if item.id else known.form
        inputs = dict(zip(known.names, item.arrays, strict=True))
        request = Request(form, inputs, known.requested, known.rows, None)
        request.trace = known.trace
        return request


class _Form(NamedTuple):
    """What a head says about requests."""

    head: wire.Head
    names: tuple[str, ...]
    form: InferForm
    requested: tuple[str, ...]
    rows: int
    trace: TraceMark | None = None


def _form_of(head: wire.Head) -> _Form:
    fields = head.fields
    try:
        sequence_id, start, end = fields["sequence"]
        form = InferForm(
            (),
            parameters=fields["parameters"],
            priority=fields["priority"],
            timeout_us=fields["timeout_us"],
            sequence_id=sequence_id,
            sequence_start=start,
            sequence_end=end,
        )
        names = tuple(tensor.name for tensor in head.tensors)
        mark = fields.get("trace")
        trace = TraceMark(int(mark[0]), str(mark[1])) if mark else None
        return _Form(head, names, form, tuple(fields["requested"]), fields["rows"], trace)
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"an item that is no request: {error!r}") from None


class OutcomeWriter:
    """Makes items of outcomes; heads of responses without parameters are made once. Not thread-safe but harmless."""

    def __init__(self) -> None:
        self._heads: dict[Any, bytes] = {}

    def draft(self, outcome: Outcome | None, index: int = 0) -> Draft:
        """An outcome of the request at ``index`` as an item; None is one too: the answer comes later, or never."""
        flags = index << 8
        if type(outcome) is Response and not outcome.parameters:
            tensors = outcome.outputs
            key = tuple([(tensor.name, tensor.datatype, tensor.data.shape) for tensor in tensors])
            head = self._heads.get(key) or self._remember(key)
            return Draft(head, [tensor.data for tensor in tensors], "", flags)
        if isinstance(outcome, Streamed):
            flags |= FINAL if outcome.final else 0
            outcome = outcome.outcome
        if isinstance(outcome, Response):
            shapes = [(tensor.name, tensor.datatype, tensor.data.shape) for tensor in outcome.outputs]
            head = wire.head(shapes, parameters=outcome.parameters)
            return Draft(head, [tensor.data for tensor in outcome.outputs], "", flags)
        if outcome is None:
            return Draft(_NO_OUTCOME, flags=flags)
        assert isinstance(outcome, RemoraError)
        return Draft(error_head(outcome), flags=flags)

    def _remember(self, tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> bytes:
        if len(self._heads) >= _REMEMBERED:
            self._heads.clear()
        head = self._heads[tensors] = wire.head(tensors)
        return head


def error_head(error: RemoraError) -> bytes:
    """An error as a head."""
    return wire.head(error=[error.code, error.message, error.from_model, error.answered])


def error_from(item: Item) -> RemoraError | None:
    """The error that an item is, None when it is none. Raises WireError."""
    told = item.head.fields.get("error")
    if told is None:
        return None
    try:
        code, message, from_model, answered = told
    except (TypeError, ValueError):
        raise WireError("an item whose error is none") from None
    return error_of(str(code), str(message), from_model=bool(from_model), answered=bool(answered))


def outcome_from(item: Item) -> Response | RemoraError | None:
    """The outcome that an item is. Raises WireError."""
    fields = item.head.fields
    if not fields:
        return Response(_tensors(item))
    error = error_from(item)
    if error is not None:
        return error
    if "none" in fields:
        return None
    parameters = fields.get("parameters", {})
    if not isinstance(parameters, dict):
        raise WireError("an item whose parameters are none")
    return Response(_tensors(item), dict(parameters))


def _tensors(item: Item) -> list[Tensor]:
    heads = item.head.tensors
    return [Tensor(tensor.name, tensor.datatype, array) for tensor, array in zip(heads, item.arrays, strict=True)]


def is_open(item: Item) -> bool:
    """Does this outcome say that the answer comes later, or never?"""
    return "none" in item.head.fields


def index_of(item: Item) -> tuple[int, bool]:
    """Which request of its execution an item answers, and whether this is its last answer."""
    return item.flags >> 8, bool(item.flags & FINAL)
