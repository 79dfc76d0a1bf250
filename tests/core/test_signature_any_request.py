"""Remembered layouts, and any request at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError
from remora.messages import Data, InputSpec
from support.models.signatures import (
    ADDSUB,
    BYTES,
    FIT,
    FIXED,
    OPTIONAL,
    OUTPUT,
    RAW,
    RESHAPE,
    ask,
    asked,
    form,
    inputs,
    signature,
    sources,
    spec,
)


def test_a_form_that_comes_again_is_checked_against_its_new_bytes() -> None:
    model, wanted = signature(ADDSUB), form(*FIT)
    first = model.request(wanted, [bytes(16), bytes(16)])
    second = model.request(wanted, [b"\x00\x00\x80\x3f" * 4, bytes(16)])
    assert first.inputs["INPUT0"].tolist() == [[0] * 4]
    assert second.inputs["INPUT0"].tolist() == [[1] * 4]
    assert first.shape_key is second.shape_key
    with pytest.raises(InvalidArgumentError, match="Expected 16, got 20"):
        model.request(wanted, [bytes(20), bytes(16)])
    model.request(wanted, [bytes(16), bytes(16)])


def test_a_refused_form_is_refused_again() -> None:
    model, wanted = signature(ADDSUB), form(FIT[0])
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="missing required"):
            model.request(wanted, [bytes(16)])


def test_equal_forms_of_two_callers_do_not_share_their_ids() -> None:
    model = signature(ADDSUB)
    for id in ("a", "b"):
        wanted = form(*FIT, id=id)
        assert model.request(wanted, [bytes(16), bytes(16)]).form is wanted
        with pytest.raises(InvalidArgumentError, match=rf"^\[request id: {id}\] "):
            model.request(wanted, [b"", b""])


def test_the_memo_stays_small_whatever_comes() -> None:
    model = signature(ADDSUB)
    for _ in range(3000):
        model.request(form(*FIT), [bytes(16), bytes(16)])
    assert len(model._memo) <= 1024


VARIABLE = 'input { name: "IN" data_type: TYPE_FP32 dims: [-1, -1] }'
STRINGS = 'max_batch_size: 4 input { name: "IN" data_type: TYPE_STRING dims: -1 }'
TWO = VARIABLE + VARIABLE.replace("IN", "X") + OUTPUT
configs = st.sampled_from([ADDSUB, FIXED, OPTIONAL, BYTES, RESHAPE, VARIABLE + OUTPUT, TWO, STRINGS + OUTPUT])


@settings(max_examples=500)
@given(st.data(), configs, st.lists(inputs, max_size=3), st.lists(st.sampled_from(["OUTPUT0", "O", "X"]), max_size=2))
def test_any_form_fits_or_is_refused(data: st.DataObject, text: str, specs: list[InputSpec], wanted: list[str]) -> None:
    model = signature(text)
    given_form = form(*specs, outputs=tuple(wanted))
    parts: list[Data] = [data.draw(sources) for _ in specs]
    try:
        request = model.request(given_form, parts)
    except InvalidArgumentError:
        return
    assert set(request.inputs) == {row.name for row in specs}
    assert 1 <= request.rows <= max(model.max_batch_size, 1)
    if model.max_batch_size:
        assert {array.shape[0] for array in request.inputs.values()} == {request.rows}


@settings(max_examples=300)
@given(
    st.data(),
    configs,
    st.lists(
        st.tuples(st.lists(inputs, max_size=3), st.sampled_from(["", "OUTPUT0", "O"]), st.sampled_from(["", "a"]))
    ),
)
def test_a_remembered_layout_is_the_one_that_is_checked_anew(
    data: st.DataObject, text: str, drawn: list[tuple[list[InputSpec], str, str]]
) -> None:
    model = signature(text)
    forms = [form(*specs, outputs=(wanted,) if wanted else (), id=id) for specs, wanted, id in drawn]
    for each in forms * 2:
        parts: list[Data] = [data.draw(sources) for _ in each.inputs]
        assert asked(model, each, parts) == asked(signature(text), each, parts)


@given(st.permutations([FIT, (FIT[0],), FIT[::-1], (spec("INPUT0", 2, 4), spec("INPUT1", 2, 4))]), st.integers(0, 48))
def test_layouts_of_several_forms_are_not_mixed_up(found: list[tuple[InputSpec, ...]], size: int) -> None:
    model = signature(ADDSUB)
    for each in [form(*specs) for specs in found] * 2:
        parts: list[Data] = [bytes(size) for _ in each.inputs]
        assert asked(model, each, parts) == asked(signature(ADDSUB), each, parts)


@given(st.integers(1, 8))
def test_every_lawful_number_of_rows_fits(rows: int) -> None:
    assert ask(ADDSUB, form(spec("INPUT0", rows, 4), spec("INPUT1", rows, 4))).rows == rows


@settings(max_examples=200)
@given(configs, st.binary(max_size=40))
def test_any_raw_body_fits_or_is_refused(text: str, body: bytes) -> None:
    try:
        request = signature(text).request(RAW, [body])
    except InvalidArgumentError:
        return
    assert len(request.inputs) == 1
