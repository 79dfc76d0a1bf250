"""Memo of repeated ModelInfer messages and templates of their answers, compared with the codec without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InternalError, RemoraError
from remora.messages import InferForm, Response, Tensor
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc import infer as codec
from remora.protocols.grpc.framing import framed
from remora.protocols.grpc.infer import (
    FINAL_KEY,
    InferCall,
    InferMemo,
    InferPrinter,
    encode_infer,
    encode_streamed,
    read_infer,
)

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor


def request(*raw: bytes, inputs: int | None = None, **fields: Any) -> bytes:
    names = [f"I{number}" for number in range(len(raw) if inputs is None else inputs)]
    fields.setdefault("model_name", "m")
    fields.setdefault("inputs", [Input(name=name, datatype="UINT8", shape=[1]) for name in names])
    return pb.ModelInferRequest(raw_input_contents=raw, **fields).SerializeToString()


def decoded(memo: InferMemo, message: bytes) -> InferCall:
    read = read_infer(message)
    call = read.decode()
    memo.learn(message, read, call)
    return call


def recalled(memo: InferMemo, message: bytes) -> InferCall | None:
    known = memo.recall(message)
    return None if known is None else known.call._replace(data=known.data(message))


def shown(call: InferCall) -> tuple[object, ...]:
    return repr(call._replace(data=[])), [bytes(each) for each in call.data]  # type: ignore[arg-type]


def test_a_message_that_comes_again_with_other_tensors_is_recalled() -> None:
    memo = InferMemo()
    first = decoded(memo, request(b"abcd", b"", b"x" * 300))
    again = request(b"efgh", b"", b"y" * 300)
    known = memo.recall(again)
    assert known is not None
    data = known.data(again)
    assert known.form is known.call.form is first.form
    assert [bytes(each) for each in data] == [b"efgh", b"", b"y" * 300]  # type: ignore[arg-type]
    assert all(isinstance(each, memoryview) and each.obj is again for each in data)


def test_tensors_of_other_sizes_and_the_same_sum_are_not_recalled() -> None:
    memo = InferMemo()
    decoded(memo, request(b"abcd", b"ef"))
    assert memo.recall(request(b"ab", b"cdef")) is None


def test_messages_of_one_length_and_heads_of_several_are_all_recalled() -> None:
    memo = InferMemo()
    sent = [request(bytes(20 - size), model_name="m" * size) for size in range(1, 6)]
    assert len({len(message) for message in sent}) == 1
    calls = [decoded(memo, message) for message in sent]
    assert [recalled(memo, message) for message in sent] == calls


@pytest.mark.parametrize(
    "message",
    [
        request(b"a", id="7"),
        request(b"a", parameters={"sequence_id": pb.InferParameter(int64_param=3)}),
        request(b"a", b"b", inputs=1),
        request(b"a") + b"\x32\x00",
        b"\x78\x01" + request(b"a"),
        request(inputs=0),
        request(b"a" * 9, model_name="m" * 5_000),
        b"".join((request(*[b""] * 200),)),
    ],
    ids=["id", "sequence", "surplus", "outputs behind", "unknown field", "no inputs", "long head", "many tensors"],
)
def test_messages_that_rarely_repeat_or_take_much_memory_are_not_remembered(message: bytes) -> None:
    memo = InferMemo()
    decoded(memo, message)
    assert memo.recall(message) is None


def test_an_input_with_its_own_contents_beside_raw_ones_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = Input(name="A", datatype="INT32", shape=[1], contents=pb.InferTensorContents(int_contents=[1]))
    message = pb.ModelInferRequest(model_name="m", inputs=[contents]).SerializeToString()
    memo = InferMemo()
    decoded(memo, message)
    assert memo.recall(message) is None


def test_the_memo_has_a_limited_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MEMO_ENTRIES", 8)
    memo = InferMemo()
    for size in range(100):
        decoded(memo, request(bytes(size)))
        assert len(memo._known) <= 8
        assert len(memo._heads) <= 8
    for size in range(100):
        decoded(memo, request(bytes(100 - size), model_name="m" * size))
    assert max(map(len, memo._heads.values())) <= codec._MEMO_HEADS


PARAMETERS = st.dictionaries(st.sampled_from(("priority", "k")), st.builds(pb.InferParameter, int64_param=st.just(1)))
INPUT = st.builds(
    Input,
    name=st.sampled_from(("A", "B")),
    datatype=st.just("UINT8"),
    shape=st.lists(st.integers(0, 3), max_size=2),
    parameters=PARAMETERS,
    contents=st.one_of(st.none(), st.none(), st.builds(pb.InferTensorContents, uint_contents=st.just([1]))),
)
MESSAGE = st.builds(
    pb.ModelInferRequest,
    model_name=st.sampled_from(("m", "model")),
    model_version=st.sampled_from(("", "1")),
    id=st.sampled_from(("", "", "1")),
    parameters=PARAMETERS,
    inputs=st.lists(INPUT, max_size=3),
    outputs=st.lists(st.builds(Output, name=st.just("O")), max_size=2),
    raw_input_contents=st.lists(st.sampled_from((b"", b"a", b"b", b"\x3a\x01c", b"\x3a\x00\x3a")), max_size=4),
)


@given(st.lists(MESSAGE, min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 255))
def test_a_recalled_message_is_what_the_decoder_makes_of_it(parts: list[Any], at: int, byte: int) -> None:
    memo = InferMemo()
    whole = [part.SerializeToString() for part in parts]
    damaged = [message[:at] + bytes((byte,)) + message[at + 1 :] for message in whole if at < len(message)]
    for message in (*whole, *damaged, *whole, *damaged):
        known = recalled(memo, message)
        try:
            call = decoded(memo, message)
        except RemoraError:
            assert known is None
            continue
        assert known is None or shown(known) == shown(call)


ARRAYS = st.builds(
    lambda shape, kind, start: (np.arange(start, start + int(np.prod(shape)))).reshape(shape).astype(kind),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(("<f4", "<i8", "u1")),
    st.integers(0, 3),
)
TENSORS = st.one_of(
    st.builds(
        lambda name, data: Tensor(name, {"f": "FP32", "i": "INT64", "u": "UINT8"}[data.dtype.kind], data),
        st.sampled_from(("A", "B")),
        ARRAYS,
    ),
    st.builds(lambda data: Tensor("T", "FP32", data.astype("<f4").T), ARRAYS),
    st.builds(lambda v: Tensor("S", "BYTES", np.array([*v, None], object)[:-1]), st.lists(st.binary(max_size=3))),
)
RESPONSES = st.builds(Response, st.lists(TENSORS, max_size=3), st.one_of(st.just({}), st.just({"k": 1})))


@given(st.lists(st.tuples(RESPONSES, st.sampled_from(("", "7")), st.sampled_from(("1", "2"))), min_size=1, max_size=6))
def test_a_printed_answer_is_the_encoders_with_its_prefix(answers: list[tuple[Response, str, str]]) -> None:
    printer = InferPrinter()
    for response, request_id, version in answers * 2:
        form = InferForm((), id=request_id)
        expected = framed(encode_infer("m", version, form, response))
        assert printer.framed("m", version, form, response) == expected


@given(st.lists(st.tuples(RESPONSES, st.sampled_from(("", "7")), st.booleans()), min_size=1, max_size=6))
def test_a_streamed_answer_is_what_the_library_makes_of_the_encoders(
    answers: list[tuple[Response, str, bool]],
) -> None:
    for response, request_id, final in answers * 2:
        form = InferForm((), id=request_id)
        marked = Response(response.outputs, {**response.parameters, FINAL_KEY: final})
        expected = pb.ModelInferResponse.FromString(encode_infer("m", "1", form, marked))
        message = pb.ModelStreamInferResponse.FromString(encode_streamed("m", "1", form, response, final))
        assert (message.infer_response, message.error_message) == (expected, "")


def test_a_streamed_answer_beyond_the_longest_message_is_refused_every_time() -> None:
    view = np.broadcast_to(np.zeros(1, "<f4"), (1 << 29,))
    for _ in range(2):
        with pytest.raises(InternalError):
            encode_streamed("m", "1", InferForm(()), Response([Tensor("A", "FP32", view)]), True)


def test_a_large_tensor_is_printed_like_a_small_one() -> None:
    printer, form = InferPrinter(), InferForm(())
    for outputs in (1, 2):
        tensors = [Tensor(f"O{n}", "FP32", np.arange(20_000, dtype="<f4")[::2]) for n in range(outputs)]
        for _ in range(2):
            assert printer.framed("m", "1", form, Response(tensors)) == framed(
                encode_infer("m", "1", form, Response(tensors))
            )


def test_an_answer_beyond_the_longest_message_is_refused_every_time() -> None:
    printer, view = InferPrinter(), np.broadcast_to(np.zeros(1, "<f4"), (1 << 29,))
    for _ in range(2):
        with pytest.raises(InternalError):
            printer.framed("m", "1", InferForm(()), Response([Tensor("A", "FP32", view)]))


def test_the_printer_has_a_limited_number_of_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MEMO_ENTRIES", 8)
    printer = InferPrinter()
    for size in range(20):
        printer.framed("m", "1", InferForm(()), Response([Tensor("A", "UINT8", np.zeros(size, "u1"))]))
        assert len(printer._templates) <= 8
