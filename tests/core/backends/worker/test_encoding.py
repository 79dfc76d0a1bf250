"""Batches of requests and of their outcomes: the same on both sides, whether they look alike or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from remora.backends.worker import wire
from remora.backends.worker.encoding import (
    OutcomeWriter,
    RequestReader,
    RequestWriter,
    TraceMark,
    outcomes_from,
    rescheduled_in,
)
from remora.backends.worker.wire import INLINE_BYTES, Drafts, Heads, Item, MessageKind, Stack, Stacked, WireError
from remora.errors import NotFoundError, RemoraError
from remora.messages import DTYPES, Array, InferForm, Outcome, Request, Response, Tensor

FORM = InferForm((), parameters={"a": 1})
OTHER = InferForm((), priority=2)
NAMED = InferForm((), id="r1")


def travelled(drafts: Drafts) -> Sequence[Item]:
    return wire.decode(bytearray(wire.encode(MessageKind.EXECUTE, 1, drafts)), Heads()).items


def array_of(shape: tuple[int, ...], datatype: str = "INT32", value: int = 0) -> Array:
    if datatype == "BYTES":
        made = np.empty(shape, object)
        made[...] = b"text"
        return made
    return np.full(shape, value, DTYPES[datatype])


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()


def request_of(form: InferForm = FORM, requested: tuple[str, ...] = ("OUT",), **inputs: Array) -> Request:
    arrays = inputs or {"IN": array_of((1, 3))}
    return Request(form, arrays, requested, next(iter(arrays.values())).shape[0] if arrays else 1, None)


def traced() -> Request:
    request = request_of()
    request.trace = TraceMark(7, "x")
    return request


def told(request: Request) -> Any:
    form = request.form
    return form.id, dict(form.parameters), form.priority, request.requested, request.rows, request.trace


requests = st.builds(
    request_of,
    st.sampled_from((FORM, FORM, FORM, OTHER, NAMED)),
    st.sampled_from((("OUT",), ("OUT",), ("OUT", "MORE"))),
    IN=st.builds(
        array_of, st.sampled_from(((1, 3), (1, 3), (2, 3), (1, INLINE_BYTES))), st.just("INT32"), st.integers(0, 9)
    ),
)
alike = st.builds(request_of, IN=st.builds(array_of, st.just((1, 3)), value=st.integers(0, 9)))


@given(st.one_of(st.lists(requests, max_size=5), st.lists(alike, min_size=2, max_size=5)))
def test_a_batch_of_requests_comes_as_it_was_sent(batch: list[Request]) -> None:
    writer, reader = RequestWriter(), RequestReader()
    for _ in range(2):  # the second time from memory
        found = reader.requests(travelled(writer.drafts(batch)))
        assert [told(each) for each in found] == [told(each) for each in batch]
        for each, sent in zip(found, batch, strict=True):
            assert list(each.inputs) == list(sent.inputs)
            assert all(same(each.inputs[name], sent.inputs[name]) for name in sent.inputs)


FORMS = [
    InferForm((), parameters=parameters, id=id)
    for parameters in ({"a": 1}, {"a": True}, {"a": 1.0}, {"a": "1"}, {})
    for id in ("", "", "r1")
]


@given(
    st.lists(
        st.lists(
            st.builds(
                request_of,
                st.sampled_from(FORMS),
                IN=st.builds(array_of, st.sampled_from(((1, 3), (2, 3))), st.sampled_from(("INT32", "BYTES"))),
            ),
            max_size=3,
        ),
        max_size=6,
    )
)
def test_what_is_remembered_of_requests_is_what_is_made_anew(batches: list[list[Request]]) -> None:
    kinds: dict[InferForm, object] = {}  # a form's tensors have one datatype each
    writer, heads, reader = RequestWriter(), Heads(), RequestReader()
    for batch in batches * 2:
        for each in batch:
            assume(kinds.setdefault(each.form, each.inputs["IN"].dtype) == each.inputs["IN"].dtype)
        encoded = wire.encode(MessageKind.EXECUTE, 1, writer.drafts(batch))
        assert encoded == wire.encode(MessageKind.EXECUTE, 1, RequestWriter().drafts(batch))
        found = reader.requests(wire.decode(bytearray(encoded), heads).items)
        assert repr([told(each) for each in found]) == repr([told(each) for each in batch])


@given(
    st.lists(
        st.lists(
            st.builds(
                lambda name, datatype, shape, parameters: Response(
                    [Tensor(name, datatype, array_of(shape, datatype))], parameters
                ),
                st.sampled_from(("OUT", "X")),
                st.sampled_from(("INT32", "FP32", "BYTES")),
                st.sampled_from(((1, 3), (3, 1), (3,), (0,))),
                st.sampled_from(({}, {"a": 1}, {"a": True})),
            ),
            max_size=3,
        ),
        max_size=6,
    )
)
def test_what_is_remembered_of_answers_is_what_is_made_anew(batches: list[list[Response]]) -> None:
    writer = OutcomeWriter()
    for batch in batches * 2:
        encoded = wire.encode(MessageKind.EXECUTE, 1, writer.drafts(batch))
        assert encoded == wire.encode(MessageKind.EXECUTE, 1, OutcomeWriter().drafts(batch))


def test_long_heads_and_ids_are_not_remembered() -> None:
    writer, heads, reader = RequestWriter(), Heads(), RequestReader()
    for form in (InferForm((), parameters={"long": "x" * 10_000}), InferForm((), id="r" * 10_000)):
        items = wire.decode(
            bytearray(wire.encode(MessageKind.EXECUTE, 1, writer.drafts([request_of(form)]))), heads
        ).items
        assert told(reader.requests(items)[0]) == told(request_of(form))
    assert not writer._heads
    assert [len(known.head.fields["parameters"]) for known in reader._forms.values()] == [0]


def test_requests_that_look_alike_travel_as_one() -> None:
    batch = [request_of(IN=array_of((1, 3), value=at), MORE=array_of((1,), "FP64", at)) for at in range(4)]
    drafts = RequestWriter().drafts(batch)
    assert isinstance(drafts, Stack)
    found = RequestReader().requests(travelled(drafts))
    assert [each.inputs["MORE"].tolist() for each in found] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "other",
    [
        request_of(OTHER),
        request_of(requested=("MORE",)),
        request_of(IN=array_of((2, 3))),
        request_of(IN=array_of((1, 4))),
        request_of(MORE=array_of((1, 3))),
        request_of(IN=array_of((1, 3)), MORE=array_of((1, 3))),
        traced(),
    ],
    ids=["form", "requested", "rows", "shape", "name", "inputs", "traced"],
)
def test_requests_that_differ_in_anything_travel_each_on_its_own(other: Request) -> None:
    for batch in ([request_of(), other], [other, request_of()]):
        drafts = RequestWriter().drafts(batch)
        assert not isinstance(drafts, Stack)
        assert [told(each) for each in RequestReader().requests(travelled(drafts))] == [told(each) for each in batch]


@pytest.mark.parametrize(
    "array",
    [array_of((1, INLINE_BYTES)), array_of((1,), "BYTES"), array_of(())],
    ids=["large", "bytes", "scalar"],
)
def test_tensors_that_do_not_suit_a_stack_travel_each_on_its_own(array: Array) -> None:
    batch = [Request(FORM, {"IN": array}, ("OUT",), 1, None) for _ in range(2)]
    assert not isinstance(RequestWriter().drafts(batch), Stack)
    outcomes = [Response([Tensor("OUT", "BYTES" if array.dtype.hasobject else "INT32", array)]) for _ in range(2)]
    assert not isinstance(OutcomeWriter().drafts(outcomes), Stack)


def test_requests_with_ids_and_requests_without_inputs_are_not_stacked() -> None:
    for request in (request_of(NAMED), Request(FORM, {}, ("OUT",), 1, None)):
        assert not isinstance(RequestWriter().drafts([request, request]), Stack)


def test_a_stack_that_claims_to_be_traced_is_ignored() -> None:
    head = (
        wire.decode(bytearray(wire.encode(MessageKind.EXECUTE, 1, [RequestWriter().draft(traced())])), Heads())
        .items[0]
        .head
    )
    with pytest.raises(WireError, match="traced"):
        RequestReader().requests(Stacked(head, [[array_of((1, 3))]]))


def answer(*tensors: Tensor, **parameters: int) -> Response:
    return Response(list(tensors), dict(parameters))


OUT = Tensor("OUT", "INT32", array_of((1, 2), value=4))
MORE = Tensor("MORE", "BF16", array_of((3,), "BF16"))
outcomes = st.sampled_from(
    (
        answer(OUT),
        answer(OUT, MORE),
        answer(OUT._replace(data=array_of((2, 2)))),
        answer(OUT, tokens=3),
        answer(),
        NotFoundError("gone", answered=True),
        None,
    )
)


@given(st.one_of(st.lists(outcomes, max_size=5), outcomes.map(lambda outcome: [outcome] * 3)), st.data())
def test_the_outcomes_of_a_batch_come_as_they_were_sent(batch: list[Outcome | None], data: st.DataObject) -> None:
    again = frozenset(at for at, outcome in enumerate(batch) if outcome is None and data.draw(st.booleans()))
    items = travelled(OutcomeWriter().drafts(batch, again))
    assert rescheduled_in(items) == again
    found = outcomes_from(items)
    assert len(found) == len(batch)
    for got, sent in zip(found, batch, strict=True):
        assert type(got) is type(sent)
        if isinstance(sent, RemoraError):
            assert str(got) == str(sent)
        if isinstance(got, Response):
            assert isinstance(sent, Response)
            assert got.parameters == sent.parameters
            assert [(each.name, each.datatype) for each in got.outputs] == [(t.name, t.datatype) for t in sent.outputs]
            assert all(same(one.data, other.data) for one, other in zip(got.outputs, sent.outputs, strict=True))


@pytest.mark.parametrize("tensors", [(OUT,), (OUT, MORE)], ids=["one", "two"])
def test_answers_that_look_alike_travel_as_one(tensors: tuple[Tensor, ...]) -> None:
    assert isinstance(OutcomeWriter().drafts([answer(*tensors)] * 2), Stack)


@pytest.mark.parametrize(
    "other",
    [
        None,
        NotFoundError("gone"),
        answer(),
        answer(OUT, tokens=3),
        answer(OUT, OUT),
        answer(OUT._replace(name="MORE")),
        answer(OUT._replace(datatype="FP32", data=array_of((1, 2), "FP32"))),
        answer(OUT._replace(data=array_of((2, 1)))),
    ],
    ids=["none", "error", "empty", "parameters", "outputs", "name", "datatype", "shape"],
)
def test_answers_that_differ_in_anything_travel_each_on_its_own(other: Outcome | None) -> None:
    for batch in ([answer(OUT), other], [other, answer(OUT)]):
        assert not isinstance(OutcomeWriter().drafts(batch), Stack)


def test_a_request_that_wants_another_turn_keeps_the_others_from_being_stacked() -> None:
    assert not isinstance(OutcomeWriter().drafts([answer(OUT), answer(OUT)], frozenset({1})), Stack)
