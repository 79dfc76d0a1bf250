"""The messages' bytes: pinned, the same both ways, and damage is always a WireError."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from remora.backends.worker import wire
from remora.backends.worker.encoding import (
    OutcomeWriter,
    RequestReader,
    RequestWriter,
    TraceMark,
    error_head,
    index_of,
    outcome_from,
)
from remora.backends.worker.wire import FINAL, Draft, Heads, MessageKind, Stack, WireError
from remora.errors import NotFoundError
from remora.messages import DTYPES, Array, InferForm, Request, Response, Streamed, Tensor, datatype_of

PLAIN = [name for name in DTYPES if name not in ("BYTES", "BF16")]


def objects(elements: list[bytes]) -> npt.NDArray[np.object_]:
    made = np.empty(len(elements), object)
    made[:] = elements
    return made


tensors = st.one_of(
    st.sampled_from(PLAIN).flatmap(
        lambda name: arrays.arrays(DTYPES[name], arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
    ),
    st.lists(st.binary(max_size=20)).map(objects),
)


def there_and_back(data: bytes, **options: object) -> wire.Message:
    return wire.decode(bytearray(data), Heads(), **options)  # type: ignore[arg-type]


def same(one: Array, other: Array) -> bool:
    if one.dtype.hasobject:
        return one.tolist() == other.tolist()
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("message", "pinned"),
    [
        (wire.encode(MessageKind.CLOSE, 7), "0401000000000000" "0700000000000000" + "00" * 16),
        (
            wire.encode(MessageKind.STREAMED, 1, [Draft(b'{"tensors":[]}', flags=FINAL | 2 << 8, id="é")], begin_ns=2),
            "0c01000001000000" "0100000000000000" "0200000000000000" "0000000000000000"
            "0e000000" "02000000" "00000000" "01020000" + b'{"tensors":[]}'.hex() + "c3a9",
        ),
        (
            wire.encode(
                MessageKind.EXECUTE, 1, [Draft(wire.head([("x", "INT16", [2])]), [np.array([1, 2], np.int16)])]
            ),
            "0501000001000000" "0100000000000000" + "00" * 16
            + "1f000000" "00000000" "01000000" "00000000" + b'{"tensors":[["x","INT16",[2]]]}'.hex() + "00"
            "00000000" "00000000" "7000000000000000" "0400000000000000" + "00" * 8 + "01000200",
        ),
    ],
)  # fmt: skip
def test_the_bytes_of_messages_are_pinned(message: bytes, pinned: str) -> None:
    assert message.hex() == pinned


@pytest.mark.parametrize(
    ("drafts", "about"),
    [
        ([Draft(id="i" * 70_000), Draft(id="ok")], "an id"),
        ([Draft(wire.head([("n" * 70_000, "INT8", [1])]), [np.zeros(1, np.int8)])], "a name"),
        ([Draft(wire.head(parameters={"p" * 70_000: "v" * 70_000}))], "a parameter"),
        ([Draft(error_head(NotFoundError("e" * 70_000)))], "the text of an error"),
        (
            [Draft(wire.head([(f"t{n}", "INT8", [1]) for n in range(65_536)]), [np.zeros(1, np.int8)] * 65_536)],
            "tensors",
        ),
        ([Draft()] * 70_000, "requests"),
        (Stack(wire.head([("t", "INT8", [1])]), [[np.zeros(1, np.int8)] * 70_000]), "stacked requests"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lengths_that_clients_choose_may_pass_16_bits(drafts: wire.Drafts, about: str) -> None:
    message = there_and_back(wire.encode(MessageKind.EXECUTE, 2**40, drafts))
    assert message.number == 2**40
    if isinstance(drafts, Stack):
        assert len(message.items) == len(drafts.columns[0]), about
        return
    sent = [(draft.id, wire.Heads().read(draft.head).fields, len(draft.arrays)) for draft in drafts]
    assert [(item.id, item.head.fields, len(item.arrays)) for item in message.items] == sent, about


def test_the_numbers_of_kinds_are_pinned() -> None:
    assert {kind.name: kind.value for kind in MessageKind} == {
        "OPEN": 1, "COMPLETE": 2, "START": 3, "CLOSE": 4, "EXECUTE": 5, "READY": 6,
        "DONE": 10, "FAILED": 11, "STREAMED": 12,
        "CANCEL": 20, "RELEASE": 21, "STREAM_READ": 22, "LOG": 30, "METRIC": 31, "METRIC_CALL": 40, "CALL": 41,
        "MODEL_CALL": 42, "ANSWER": 43, "REFUSED": 44, "CALL_STREAMED": 45, "CALL_CANCEL": 46, "SPILLED": 50,
    }  # fmt: skip


@given(st.sampled_from(MessageKind), st.integers(0, 2**64 - 1), st.lists(st.tuples(tensors, st.text(max_size=5))))
def test_messages_come_back_as_they_were(kind: MessageKind, number: int, contents: list[tuple[Array, str]]) -> None:
    drafts = [
        Draft(wire.head([("t", datatype_of(array), array.shape)], text=text), [array], text, index)
        for index, (array, text) in enumerate(contents)
    ]
    message = there_and_back(wire.encode(kind, number, drafts, begin_ns=3, end_ns=4))
    assert (message.kind, message.number, message.begin_ns, message.end_ns) == (kind, number, 3, 4)
    assert len(message.items) == len(contents)
    for index, (item, (array, text)) in enumerate(zip(message.items, contents, strict=True)):
        assert (item.id, item.flags, item.head.fields) == (text, index, {"text": text})
        assert same(item.arrays[0], array)
        assert item.arrays[0].flags.writeable


shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


@st.composite
def alike(draw: st.DrawFn) -> list[Draft]:
    """Items whose arrays differ in nothing but their values."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(PLAIN), shapes), min_size=1, max_size=3))
    head = wire.head([(f"t{at}", name, shape) for at, (name, shape) in enumerate(kinds)], text="x")
    count = draw(st.integers(1, 5))
    return [Draft(head, [draw(arrays.arrays(DTYPES[name], shape)) for name, shape in kinds]) for _ in range(count)]


def stack_of(drafts: list[Draft]) -> Stack:
    return Stack(drafts[0].head, list(zip(*[draft.arrays for draft in drafts], strict=True)))


@given(alike())
def test_items_that_look_alike_come_back_one_by_one_however_they_travel(drafts: list[Draft]) -> None:
    stacked = wire.encode(MessageKind.EXECUTE, 5, stack_of(drafts), begin_ns=3, end_ns=4)
    assert stacked[1] == wire.STACK
    assert wire.nbytes_of(stack_of(drafts)) == wire.nbytes_of(drafts)
    for data in (stacked, wire.encode(MessageKind.EXECUTE, 5, drafts, begin_ns=3, end_ns=4)):
        message = there_and_back(data)
        assert (message.kind, message.number, message.begin_ns, message.end_ns) == (MessageKind.EXECUTE, 5, 3, 4)
        assert len(message.items) == len(drafts)
        assert len(message.items[1:]) == len(drafts) - 1
        for item, draft in zip(message.items, drafts, strict=True):
            assert (item.id, item.flags, item.head.fields) == ("", 0, {"text": "x"})
            assert all(same(found, sent) for found, sent in zip(item.arrays, draft.arrays, strict=True))
            assert all(array.flags.writeable for array in item.arrays)


def test_arrays_with_gaps_are_stacked_as_well() -> None:
    array = np.arange(6, dtype=np.int32)
    stack = Stack(wire.head([("t", "INT32", (3,))]), [[array[::2], array[1::2]]])
    found = there_and_back(wire.encode(MessageKind.EXECUTE, 1, stack)).items
    assert [item.arrays[0].tolist() for item in found] == [[0, 2, 4], [1, 3, 5]]


@given(st.data(), alike())
def test_a_damaged_stack_is_a_message_or_a_wire_error(data: st.DataObject, drafts: list[Draft]) -> None:
    whole = bytearray(wire.encode(MessageKind.DONE, 1, stack_of(drafts)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (whole, whole[:cut]):
        try:
            wire.decode(bytearray(damaged), Heads())
        except WireError:
            continue


@given(tensors)
def test_arrays_in_the_arena_are_views_of_it(array: Array) -> None:
    memory = np.zeros(4096, np.uint8)

    def place(placed: Array) -> int:
        memory[64 : 64 + placed.nbytes] = np.frombuffer(placed.tobytes(), np.uint8)
        return 64

    draft = Draft(wire.head([("t", datatype_of(array), array.shape)]), [array])
    message = there_and_back(
        wire.encode(MessageKind.EXECUTE, 1, [draft], place),
        fetch=lambda offset, length: memory[offset : offset + length],
    )
    (found,) = message.items[0].arrays
    assert same(found, array)
    if not array.dtype.hasobject and array.nbytes:
        assert np.shares_memory(found, memory)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        there_and_back(data)
    except WireError:
        return


@settings(max_examples=300)
@given(st.data(), tensors)
def test_a_damaged_message_is_a_message_or_a_wire_error(data: st.DataObject, array: Array) -> None:
    draft = Draft(wire.head([("t", datatype_of(array), array.shape)], parameters={"a": 1}), [array], "id")
    whole = bytearray(wire.encode(MessageKind.DONE, 1, [draft, Draft(error_head(NotFoundError("no")))]))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (whole, whole[:cut]):
        try:
            message = wire.decode(bytearray(damaged), Heads())
            for item in message.items:
                outcome_from(item)
                index_of(item)
                RequestReader().request(item)
        except WireError:
            continue


def test_a_message_of_an_unknown_layout_is_refused() -> None:
    data = bytearray(wire.encode(MessageKind.CLOSE))
    data[1] = 9
    with pytest.raises(WireError, match="layout 9"):
        wire.decode(data, Heads())


@pytest.mark.parametrize(
    ("data", "shape", "reason"),
    [(b"\x05\0\0\0abc", (1,), "middle"), (b"\0\0\0\0x", (1,), "left"), (b"\0\0\0\0", (1 << 40,), "do not fit")],
)
def test_elements_that_do_not_add_up_are_refused(data: bytes, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        wire.unpack_elements(memoryview(data), shape)


def test_a_request_says_all_that_it_did() -> None:
    form = InferForm((), (), "r1", {"a": 1, "b": "x", "c": True, "d": 1.5}, 2, 1000, "s", True, False)
    request = Request(form, {"IN": np.arange(6, dtype=np.int32).reshape(2, 3)}, ("OUT", "MORE"), 2, "key")
    writer, reader = RequestWriter(), RequestReader()
    for _ in range(2):  # the second time from memory
        message = there_and_back(wire.encode(MessageKind.EXECUTE, 1, [writer.draft(request)]))
        again = reader.request(message.items[0])
        assert (again.form, again.requested, again.rows) == (again.form, ("OUT", "MORE"), 2)
        for field in ("id", "parameters", "priority", "timeout_us", "sequence_id", "sequence_start", "sequence_end"):
            assert getattr(again.form, field) == getattr(form, field)
        assert same(again.inputs["IN"], request.inputs["IN"])


def test_a_traced_request_says_whose_trace_it_is_and_the_next_one_says_nothing() -> None:
    form = InferForm((), (), "r1")
    writer, reader = RequestWriter(), RequestReader()
    marks: list[object] = []
    for trace in (TraceMark(7, '{"traceparent":"x"}'), None):
        request = Request(form, {"IN": np.arange(2, dtype=np.int32)}, ("OUT",), 1, "key")
        request.trace = trace
        again = reader.request(there_and_back(wire.encode(MessageKind.EXECUTE, 1, [writer.draft(request)])).items[0])
        marks.append(again.trace)
    assert marks == [TraceMark(7, '{"traceparent":"x"}'), None]


@pytest.mark.parametrize(
    "outcome",
    [
        None,
        NotFoundError("gone", from_model=True, answered=True),
        Response([]),
        Response([Tensor("OUT", "BF16", np.arange(3, dtype=np.uint16))], {"tokens": 3}),
        Response([Tensor("OUT", "BYTES", objects([b"a", b""])), Tensor("N", "FP64", np.array(2.5))]),
    ],
)
@pytest.mark.parametrize("final", [None, False, True])
def test_an_outcome_comes_back_as_it_was(outcome: Response | NotFoundError | None, final: bool | None) -> None:
    sent = outcome if final is None else Streamed(outcome, final)
    message = there_and_back(wire.encode(MessageKind.DONE, 1, [OutcomeWriter().draft(sent, 5)]))
    (item,) = message.items
    assert index_of(item) == (5, bool(final))
    found = outcome_from(item)
    if isinstance(outcome, Response):
        assert isinstance(found, Response)
        assert found.parameters == outcome.parameters
        assert [(each.name, each.datatype) for each in found.outputs] == [(t.name, t.datatype) for t in outcome.outputs]
        assert all(same(one.data, two.data) for one, two in zip(found.outputs, outcome.outputs, strict=True))
    elif outcome is not None:
        assert isinstance(found, NotFoundError)
        assert (found.message, found.from_model, found.answered) == ("gone", True, True)
    else:
        assert found is None
