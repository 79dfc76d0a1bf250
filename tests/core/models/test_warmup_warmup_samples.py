"""Samples out of a configuration: what is sent, and what is refused before anything is read or made."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.config import data_type_of
from remora.errors import ConfigError
from remora.messages import DTYPES
from remora.models.warmup import derived_sample, samples_of
from remora.proto.model_config_pb2 import ModelConfig
from remora.signature import Signature
from support.engine.fakes import config_of

IO = 'input { name: "IN" data_type: TYPE_INT32 dims: [ 2 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 2 ] }'


def config(sample: str, batch: int = 4, io: str = IO) -> ModelConfig:
    return config_of(f'max_batch_size: {batch} {io} model_warmup {{ name: "s" {sample} }}')


def one(data: str, data_type: str = "TYPE_INT32", dims: str = "2") -> str:
    return f'inputs {{ key: "IN" value {{ data_type: {data_type} dims: [ {dims} ] {data} }} }}'


def unread(name: str) -> bytes:
    raise AssertionError(f"nothing asks for the file {name}")


def test_a_sample_is_one_row_repeated_by_batch_size_and_count() -> None:
    (sample,) = samples_of(config("batch_size: 3 count: 2 " + one("zero_data: true")), unread)
    assert (sample.batch_size, sample.rounds) == (3, 2)
    assert sample.form.inputs == (("IN", "INT32", (1, 2)),)
    assert np.array_equal(np.asarray(sample.data[0]), [[0, 0]])


def test_count_left_out_means_once() -> None:
    (sample,) = samples_of(config("batch_size: 1 " + one("zero_data: true")), unread)
    assert (sample.batch_size, sample.rounds) == (1, 1)


def test_a_sample_without_a_batch_size_is_not_run_whatever_it_says() -> None:
    assert samples_of(config(one("")), unread) == []


def test_a_model_without_batching_gets_the_dims_as_they_are() -> None:
    (sample,) = samples_of(config("batch_size: 1 " + one("zero_data: true"), batch=0), unread)
    assert sample.form.inputs[0].shape == (2,)


def test_a_batch_larger_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size 5, but max_batch_size is 4"):
        samples_of(config("batch_size: 5 " + one("zero_data: true")), unread)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            one("zero_data: true", dims="-1"),
            "^warmup setting expects all variable-size dimensions are specified for input",
        ),
        (one(""), r"^\[request id: <id_unknown>\] warmup setting expects input 'IN' to have input_data_type set$"),
        (one("zero_data: true", data_type="TYPE_INVALID"), "has no data_type"),
        (one("zero_data: true", dims="1073741824, 1073741824"), "the limit is"),
        (one("zero_data: true", data_type="TYPE_STRING", dims="1073741824"), "the limit is"),
    ],
)
def test_an_input_that_cannot_be_made_is_refused_before_memory_is_taken(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        samples_of(config("batch_size: 1 " + text), unread)


def test_a_file_gives_its_first_bytes() -> None:
    content = np.array([7, 8, 9], "<i4").tobytes()
    (sample,) = samples_of(config("batch_size: 1 " + one('input_data_file: "f"')), {"f": content}.__getitem__)
    request = Signature(config(""), "m").request(sample.form, sample.data)
    assert request.inputs["IN"].tolist() == [[7, 8]]


def test_a_file_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="expects 8 bytes, but the data provided from fonly has 7 bytes"):
        samples_of(config("batch_size: 1 " + one('input_data_file: "f"')), lambda _name: bytes(7))


def test_a_file_of_text_has_the_wires_form() -> None:
    io = IO.replace("TYPE_INT32", "TYPE_STRING")
    made = config("batch_size: 1 " + one('input_data_file: "f"', "TYPE_STRING"), io=io)
    (sample,) = samples_of(made, lambda _name: b"\x02\0\0\0hi\0\0\0\0")
    assert Signature(made, "m").request(sample.form, sample.data).inputs["IN"].tolist() == [[b"hi", b""]]


def test_inputs_that_only_the_server_makes_are_kept_apart() -> None:
    text = one("zero_data: true") + one("zero_data: true", "TYPE_FP32", "1").replace("IN", "START")
    (sample,) = samples_of(config("batch_size: 1 " + text), unread)
    assert [spec.name for spec in sample.form.inputs] == ["IN"]
    assert sample.extra["START"].tolist() == [[0.0]]


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3), st.booleans(), st.booleans())
def test_made_data_fits_every_datatype_and_shape(
    datatype: str, dims: list[int], is_random: bool, batches: bool
) -> None:
    made = ModelConfig(max_batch_size=4 if batches else 0)
    made.input.add(name="IN", data_type=data_type_of(datatype), dims=dims)
    warmup = made.model_warmup.add(name="s", batch_size=1)
    warmup.inputs["IN"].data_type = data_type_of(datatype)
    warmup.inputs["IN"].dims.extend(dims)
    setattr(warmup.inputs["IN"], "random_data" if is_random else "zero_data", True)
    (sample,) = samples_of(made, unread)
    array = Signature(made, "m").request(sample.form, sample.data).inputs["IN"]
    assert array.dtype == DTYPES[datatype]
    assert array.size == math.prod(dims)
    assert datatype != "BYTES" or all(type(element) is bytes for element in array.flat)
    if array.dtype.kind == "f":
        assert np.isfinite(array).all()


def test_zeros_are_derived_for_numbers_of_fixed_dims() -> None:
    sample = derived_sample(config_of(f"max_batch_size: 4 {IO}"))
    assert sample is not None
    assert sample.form.inputs == (("IN", "INT32", (1, 2)),)


@pytest.mark.parametrize(
    "text",
    [
        IO.replace("dims: [ 2 ] } output", "dims: [ -1 ] } output"),
        IO.replace("TYPE_INT32", "TYPE_STRING"),
        IO.replace("dims: [ 2 ] } output", "dims: [ 99999999 ] } output"),
        IO + " model_transaction_policy { decoupled: true }",
        IO + " sequence_batching { }",
        IO.replace("dims: [ 2 ] } output", "dims: [ 2 ] optional: true } output"),
    ],
)
def test_nothing_is_derived_where_it_would_be_a_guess(text: str) -> None:
    assert derived_sample(config_of(text)) is None
