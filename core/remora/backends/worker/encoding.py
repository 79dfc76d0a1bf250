"""Conversion of requests and outcomes to the items of messages, and back. Pure.

Each kind of head is encoded in one place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from remora.backends.worker import wire
from remora.backends.worker.wire import AGAIN, FINAL, INLINE_BYTES, Draft, Drafts, Item, Stack, Stacked, WireError
from remora.errors import InternalError, RemoraError, error_of
from remora.messages import Array, InferForm, Outcome, Request, Response, Streamed, Tensor, datatype_of

_REMEMBERED = 512
_NO_OUTCOME = wire.head(none=True)


class RequestWriter:
    """Encoder of requests that caches the heads of equal forms with equal shapes."""

    def __init__(self) -> None:
        self._heads: dict[Any, bytes] = {}

    def drafts(self, requests: Sequence[Request]) -> Drafts:
        """Return requests as the content of a message, a stack if they are alike."""
        columns = _alike(requests)
        if columns is None:
            return [self.draft(request) for request in requests]
        return Stack(self._head(requests[0], [column[0] for column in columns]), columns)

    def draft(self, request: Request) -> Draft:
        """Return the request as an item."""
        arrays = list(request.inputs.values())
        if request.trace is not None:  # this head does not recur
            return Draft(
                _request_head(request, trace=[request.trace.id, request.trace.context]), arrays, request.form.id
            )
        return Draft(self._head(request, arrays), arrays, request.form.id)

    def _head(self, request: Request, arrays: Sequence[Array]) -> bytes:
        key = (request.form, request.requested, request.rows, tuple([array.shape for array in arrays]))
        head = self._heads.get(key)
        if head is None:
            head = _request_head(request)
            # Clients choose ids and parameters, so a form with an id does not recur, and a long one is not cached.
            if not request.form.id and len(head) <= wire.LONGEST_REMEMBERED:
                if len(self._heads) >= _REMEMBERED:
                    self._heads.clear()
                self._heads[key] = head
        return head


def _alike(requests: Sequence[Request]) -> list[tuple[Array, ...]] | None:
    """Return the inputs of stackable requests by column, or None if they cannot be stacked."""
    count = len(requests)
    if count < 2:
        return None
    first = requests[0]
    form = first.form
    if (
        form.id
        or [request.form for request in requests].count(form) < count
        or [request.requested for request in requests].count(first.requested) < count
        or [request.rows for request in requests].count(first.rows) < count
        or [request.trace for request in requests].count(None) < count
        or [[*request.inputs] for request in requests].count([*first.inputs]) < count
    ):
        return None
    columns = list(zip(*[request.inputs.values() for request in requests], strict=True))
    return columns if columns and all(map(_stackable, columns)) else None


def _stackable(column: Sequence[Array]) -> bool:
    """Return True if these arrays of one datatype are small and of one shape."""
    first = column[0]
    shape = first.shape
    return (
        bool(shape)
        and first.nbytes < INLINE_BYTES
        and not first.dtype.hasobject
        and [array.shape for array in column].count(shape) == len(column)
    )


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
    """A request's trace as the worker knows it, see ``messages.RequestTrace``.

    The worker's calls refer to it by its id.
    """

    id: int
    context: str

    def wrap_child(self, model: Any) -> Any:
        """Return the model unchanged, because the server traces the calls."""
        return model

    def record_inputs(self, request: Request) -> None:
        """Do nothing, because the server has recorded them."""

    def record_answer(self, attributes: Mapping[str, Any], events: Sequence[tuple[str, int]]) -> None:
        """Do nothing, because language models do not run in a worker."""


class RequestReader:
    """Decoder of requests with a cache of forms, because most requests recur. Not thread-safe."""

    def __init__(self) -> None:
        self._forms: dict[int, _Form] = {}

    def requests(self, items: Sequence[Item]) -> list[Request]:
        """Return the requests, with the items' arrays as inputs. Raises WireError."""
        if not isinstance(items, Stacked):
            return [self.request(item) for item in items]
        _, names, form, requested, rows, trace = self._form(items.head)
        if trace is not None:
            raise WireError("a stack of requests that are traced")
        # zip is safe: the decoder has checked that there is one column per name and that all have one length.
        return [Request(form, dict(zip(names, row)), requested, rows, None) for row in zip(*items.columns)]  # noqa: B905

    def request(self, item: Item) -> Request:
        """Return the request, with the item's arrays as inputs. Raises WireError."""
        _, names, form, requested, rows, trace = self._form(item.head)
        if item.id:
            form = replace(form, id=item.id)
        request = Request(form, dict(zip(names, item.arrays, strict=True)), requested, rows, None)
        request.trace = trace
        return request

    def _form(self, head: wire.MessageHeader) -> _Form:
        form = self._forms.get(id(head))
        if form is None or form.head is not head:
            form = _form_of(head)
            if head.remembered:
                if len(self._forms) >= _REMEMBERED:
                    self._forms.clear()
                self._forms[id(head)] = form
        return form


class _Form(NamedTuple):
    """Request fields of a decoded head."""

    head: wire.MessageHeader
    names: tuple[str, ...]
    form: InferForm
    requested: tuple[str, ...]
    rows: int
    trace: TraceMark | None = None


def _form_of(head: wire.MessageHeader) -> _Form:
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
        raise WireError(f"an item that is not a request: {error!r}") from None


class OutcomeWriter:
    """Encoder of outcomes that caches the heads of responses without parameters.

    Not thread-safe, but a race only repeats work.
    """

    def __init__(self) -> None:
        self._heads: dict[Any, bytes] = {}

    def drafts(self, outcomes: Sequence[Outcome | None], rescheduled: Collection[int] = ()) -> Drafts:
        """Return the outcomes of an execution, as a stack if they are alike.

        ``rescheduled`` are the indices of the requests that the model wants to be scheduled again.
        """
        outputs = None if rescheduled else _alike_answers(outcomes)
        if outputs is None:
            drafts = [self._draft_alone(outcome) for outcome in outcomes]
            for index in rescheduled:
                drafts[index] = drafts[index]._replace(flags=drafts[index].flags | AGAIN)
            return drafts
        return Stack(
            self._head(tuple([(column[0].name, column[0].datatype, column[0].data.shape) for column in outputs])),
            [[tensor.data for tensor in column] for column in outputs],
        )

    def _draft_alone(self, outcome: Outcome | None) -> Draft:
        """Return an outcome as an item, or an error if it cannot be encoded.

        The other items of the message must not fail with it.
        """
        try:
            return self.draft(outcome)
        except (TypeError, ValueError, OverflowError) as error:
            failure = InternalError(f"an answer cannot be sent to the server: {error}", from_model=True)
            return self.draft(failure)

    def draft(self, outcome: Outcome | None, index: int = 0) -> Draft:
        """Return an outcome of the request at ``index`` as an item.

        None is an outcome too: the answer comes later, or never.
        """
        flags = index << 8
        if type(outcome) is Response and not outcome.parameters:
            tensors = outcome.outputs
            head = self._head(tuple([(tensor.name, tensor.datatype, tensor.data.shape) for tensor in tensors]))
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

    def _head(self, tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> bytes:
        head = self._heads.get(tensors)
        if head is None:
            if len(self._heads) >= _REMEMBERED:
                self._heads.clear()
            head = self._heads[tensors] = wire.head(tensors)
        return head


def _alike_answers(outcomes: Sequence[Outcome | None]) -> list[tuple[Tensor, ...]] | None:
    """Return the outputs of stackable answers by column, or None if they cannot be stacked."""
    count = len(outcomes)
    if count < 2 or [type(outcome) for outcome in outcomes].count(Response) < count:
        return None
    answers = cast("Sequence[Response]", outcomes)
    if any(answer.parameters for answer in answers):
        return None
    rows = [answer.outputs for answer in answers]
    if [len(outputs) for outputs in rows].count(len(rows[0])) < count:
        return None
    columns = list(zip(*rows, strict=True))
    for column in columns:
        name, datatype, _ = column[0]
        if (
            [tensor.name for tensor in column].count(name) < count
            or [tensor.datatype for tensor in column].count(datatype) < count
            or not _stackable([tensor.data for tensor in column])
        ):
            return None
    return columns or None


def error_head(error: RemoraError) -> bytes:
    """Return an error as a head."""
    return wire.head(error=[error.code, error.message, error.from_model, error.answered])


def error_from(item: Item) -> RemoraError | None:
    """Return the error in an item, or None. Raises WireError."""
    error = item.head.fields.get("error")
    if error is None:
        return None
    try:
        code, message, from_model, answered = error
    except (TypeError, ValueError):
        raise WireError("an item whose error is malformed") from None
    return error_of(str(code), str(message), from_model=bool(from_model), answered=bool(answered))


def outcomes_from(items: Sequence[Item]) -> list[Response | RemoraError | None]:
    """Return the outcomes in items. Raises WireError."""
    if not isinstance(items, Stacked) or items.head.fields:
        return [outcome_from(item) for item in items]
    heads = items.head.tensors
    if len(heads) == 1:  # the common case
        name, datatype = heads[0].name, heads[0].datatype
        return [Response([Tensor(name, datatype, array)]) for array in items.columns[0]]
    return [Response(_tensors(item)) for item in items]


def outcome_from(item: Item) -> Response | RemoraError | None:
    """Return the outcome in an item. Raises WireError."""
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
        raise WireError("an item whose parameters are not an object")
    return Response(_tensors(item), dict(parameters))


def _tensors(item: Item) -> list[Tensor]:
    heads = item.head.tensors
    return [Tensor(tensor.name, tensor.datatype, array) for tensor, array in zip(heads, item.arrays, strict=True)]


def rescheduled_in(items: Sequence[Item]) -> frozenset[int]:
    """Return the indices of the requests that the model wants to be scheduled again."""
    if isinstance(items, Stacked):  # stacks have no flags
        return frozenset()
    return frozenset(index for index, item in enumerate(items) if item.flags & AGAIN)


def is_open(item: Item) -> bool:
    """Return True if the answer comes later, or never."""
    return "none" in item.head.fields


def is_open_draft(draft: Draft) -> bool:
    """Return True if this item to encode is an answer that comes later, or never."""
    return draft.head is _NO_OUTCOME


def index_of(item: Item) -> tuple[int, bool]:
    """Return the index of the answered request, and True if this is its last answer."""
    return item.flags >> 8, bool(item.flags & FINAL)
