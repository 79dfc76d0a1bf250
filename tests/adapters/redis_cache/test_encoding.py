"""Answers as bytes: what goes in comes out, whole; what is damaged is refused and never believed."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from remora.messages import DTYPES, Array, Response, Tensor
from remora_adapters.redis_cache.encoding import MAGIC, MAX_BYTES, decode, encode

shapes = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
plain = st.sampled_from([name for name in DTYPES if name != "BYTES"]).flatmap(
    lambda name: arrays_of.arrays(DTYPES[name], shapes).map(lambda array: (name, array))
)
elements = st.binary(max_size=9) | st.text(max_size=9)


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, Array]:
    shape = draw(shapes)
    array = np.empty(shape, object)
    for place in np.ndindex(shape):
        array[place] = draw(elements)
    return "BYTES", array


tensors = st.builds(lambda name, pair: Tensor(name, *pair), st.text(max_size=9), plain | objects())
parameters = st.dictionaries(
    st.text(max_size=9), st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9), max_size=4
)
answers = st.builds(Response, st.lists(tensors, max_size=4), parameters)


def same(one: Response, other: Response) -> bool:
    return (
        repr(one.parameters) == repr(other.parameters)
        and len(one.outputs) == len(other.outputs)
        and all(
            left[:2] == right[:2]
            and left.data.dtype == right.data.dtype
            and left.data.shape == right.data.shape
            and (
                [type(each) for each in left.data.flat] == [type(each) for each in right.data.flat]
                and left.data.tolist() == right.data.tolist()
                if left.data.dtype.hasobject
                else left.data.tobytes() == right.data.tobytes()
            )
            for left, right in zip(one.outputs, other.outputs, strict=True)
        )
    )


@settings(max_examples=200, deadline=None)
@given(answers)
def test_what_goes_in_comes_out(answer: Response) -> None:
    data = encode(answer)
    assert data is not None
    found = decode(data)
    assert same(found, answer)
    assert not any(tensor.data.flags.writeable for tensor in found.outputs)


@settings(max_examples=200, deadline=None)
@given(answers, st.data())
def test_what_is_cut_or_goes_on_is_refused(answer: Response, data: st.DataObject) -> None:
    whole = encode(answer)
    assert whole is not None
    for damaged in (whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"\0"):
        with pytest.raises(ValueError, match="cached response"):
            decode(damaged)


@settings(max_examples=300, deadline=None)
@given(answers, st.data())
def test_whatever_is_changed_gives_an_answer_or_a_refusal_and_nothing_else(
    answer: Response, data: st.DataObject
) -> None:
    whole = bytearray(encode(answer) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(whole))
    except ValueError:
        return


@given(st.binary(max_size=200))
def test_what_a_stranger_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cached response"):
        decode(data)


def test_no_memory_is_taken_for_what_is_only_claimed() -> None:
    u32 = struct.Struct("<I").pack
    name = u32(1) + b"x"
    head = MAGIC + u32(1) + u32(0)
    huge = struct.pack("<q", 1 << 40)
    for claim in (
        MAGIC + u32(0xFFFFFFFF) + u32(0xFFFFFFFF),
        head + name + u32(4) + b"FP32" + b"\1" + huge + struct.pack("<Q", 1 << 42),
        head + name + u32(5) + b"BYTES" + b"\1" + huge + struct.pack("<Q", 0),
        head + name + u32(4) + b"FP32" + b"\xff" + b"\0" * 2048,
        head + u32(0xFFFFFFF0) + b"x",
    ):
        with pytest.raises(ValueError, match="cached response"):
            decode(claim)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", object()),  # type: ignore[arg-type]
        Tensor("x", "FP64", np.zeros(2, np.float32)),
        Tensor("x", "NONE", np.zeros(2, np.float32)),
        Tensor("x", "BYTES", np.array([1, "a"], object)),
        Tensor("x", "UINT8", np.broadcast_to(np.zeros((), np.uint8), (MAX_BYTES + 1,))),
    ],
    ids=["device", "other-type", "unknown-type", "objects", "too-long"],
)
def test_responses_that_cannot_be_encoded_are_not_kept(tensor: Tensor) -> None:
    assert encode(Response([tensor])) is None
