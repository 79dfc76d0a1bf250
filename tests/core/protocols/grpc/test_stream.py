"""ModelStreamInfer without a socket: its messages and the order in which answers are sent."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InternalError, MalformedError, NotFoundError
from remora.messages import InferForm, Response, Streamed, Tensor
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.stream import (
    AnswerOrder,
    Entry,
    StreamAnswer,
    encode_answer,
    encode_refusal,
    final_of,
    id_of,
    is_strict,
)

FORM = InferForm((), id="r")


def response() -> Response:
    return Response([Tensor("OUT", "INT32", np.array([7], "<i4"))], {"mood": "good"})


def read(message: bytes | None) -> dict[str, object]:
    assert message is not None
    return MessageToDict(pb.ModelStreamInferResponse.FromString(message), preserving_proto_field_name=True)


@pytest.mark.parametrize("final", [False, True])
def test_an_answer_says_whether_it_is_the_last(final: bool) -> None:
    answered = response()
    message = encode_answer("m", "3", FORM, Streamed(answered, final), empty_final=False)
    assert read(message) == {
        "infer_response": {
            "model_name": "m",
            "model_version": "3",
            "id": "r",
            "parameters": {"mood": {"string_param": "good"}, "triton_final_response": {"bool_param": final}},
            "outputs": [{"name": "OUT", "datatype": "INT32", "shape": ["1"]}],
            "raw_output_contents": ["BwAAAA=="],
        }
    }
    assert answered.parameters == {"mood": "good"}  # one response may be on its way to others, too


def test_an_empty_final_answer_is_sent_only_if_requested() -> None:
    assert encode_answer("m", "3", FORM, Streamed(None, True), empty_final=False) is None
    assert read(encode_answer("m", "3", FORM, Streamed(None, True), empty_final=True)) == {
        "infer_response": {
            "model_name": "m",
            "id": "r",
            "parameters": {"triton_final_response": {"bool_param": True}},
        }
    }


def test_a_models_error_carries_model_and_id() -> None:
    assert read(encode_answer("m", "3", FORM, Streamed(NotFoundError("gone"), False), empty_final=False)) == {
        "error_message": "gone",
        "infer_response": {
            "model_name": "m",
            "id": "r",
            "parameters": {"triton_final_response": {"bool_param": False}},
        },
    }


def test_a_refusal_carries_the_id_alone() -> None:
    assert read(encode_refusal(NotFoundError("no"), "r")) == {"error_message": "no", "infer_response": {"id": "r"}}


def test_texts_that_are_not_utf8_leave_with_a_question_mark_for_each_odd_byte() -> None:
    odd = InternalError(b"bad \xff\xfe".decode("utf-8", "surrogateescape"))
    assert read(encode_refusal(odd, "r"))["error_message"] == "bad ??"
    assert read(encode_answer("m", "3", FORM, Streamed(odd, True), empty_final=False))["error_message"] == "bad ??"
    answered = Response([Tensor("OUT\udcff", "INT32", np.array([7], "<i4"))], {"mood\udcff": "go\udcffod"})
    message = read(encode_answer("m", "3", FORM, Streamed(answered, True), empty_final=False))["infer_response"]
    assert isinstance(message, dict)
    assert message["parameters"]["mood?"] == {"string_param": "go?od"}
    assert message["outputs"][0]["name"] == "OUT?"


def test_what_a_plain_model_answers_is_final() -> None:
    error = InternalError("x")
    assert final_of(error) == Streamed(error, True)
    assert final_of(Streamed(None, False)) == Streamed(None, False)


@pytest.mark.parametrize(("value", "strict"), [("true", True), ("false", False), ("True", False), ("1", False)])
def test_only_the_word_true_asks_for_statuses(value: str, strict: bool) -> None:
    assert is_strict([("other", "true"), ("triton_grpc_error", value)]) is strict


def test_the_id_of_a_request_with_a_bad_version_is_found() -> None:
    assert id_of(pb.ModelInferRequest(id="x", model_version="abc").SerializeToString()) == "x"
    with pytest.raises(MalformedError):
        id_of(b"\xff")


# -- Order ----------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, bool]]:
    """What happens on a stream: ("add", n, in line?) and ("answer", n, final?), each request answered to its end."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    left = {n: 1 if in_line else draw(st.integers(1, 4)) for n, in_line in enumerate(kinds)}
    events: list[tuple[str, int, bool]] = []
    added = 0
    while added < len(kinds) or left:
        ready = [n for n in left if n < added]
        if added < len(kinds) and (not ready or draw(st.booleans())):
            events.append(("add", added, kinds[added]))
            added += 1
            continue
        n = draw(st.sampled_from(ready))
        left[n] -= 1
        final = not left[n]
        if final:
            del left[n]
        events.append(("answer", n, final))
    return events


@given(histories())
def test_every_request_gets_its_answers_in_order_with_one_final(events: list[tuple[str, int, bool]]) -> None:
    order, entries, sent = AnswerOrder(), {}, []
    leaving: list[tuple[int, int, bool]] = []
    numbers: dict[int, int] = {}
    for what, n, flag in events:
        if what == "add":
            entries[n] = Entry(in_line=flag)
            order.add(entries[n])
            continue
        index = numbers[n] = numbers.get(n, -1) + 1
        sent.append((n, index, flag))
        for answer in order.answer(entries[n], StreamAnswer(b"%d %d" % (n, index), flag)):
            assert answer.message is not None
            number, at = map(int, answer.message.split())
            leaving.append((number, at, answer.final))
    # Safety: nothing is lost, made up or doubled; each request's answers keep their order; one final each.
    assert sorted(leaving) == sorted(sent)
    for n in entries:
        assert [at for number, at, _ in leaving if number == n] == list(range(numbers[n] + 1))
        assert [final for number, _, final in leaving if number == n] == [False] * numbers[n] + [True]
    in_line = [n for n, entry in entries.items() if entry.in_line]
    assert [n for n, _, _ in leaving if n in in_line] == in_line
    assert order.open == 0


@given(histories())
def test_what_may_leave_leaves_at_once(events: list[tuple[str, int, bool]]) -> None:
    order, entries, done = AnswerOrder(), {}, set()
    for what, n, flag in events:
        if what == "add":
            entries[n] = Entry(in_line=flag)
            order.add(entries[n])
            continue
        answers = order.answer(entries[n], StreamAnswer(b"%d" % n, flag))
        ahead = [m for m, entry in entries.items() if m < n and entry.in_line and m not in done]
        if flag:
            done.add(n)
        assert bool(answers) == (not entries[n].in_line or not ahead)


def test_what_comes_after_the_final_answer_is_dropped() -> None:
    order, entry = AnswerOrder(), Entry(in_line=False)
    order.add(entry)
    assert len(order.answer(entry, StreamAnswer(b"a", True))) == 1
    assert order.answer(entry, StreamAnswer(b"b", True)) == ()
    assert order.open == 0
