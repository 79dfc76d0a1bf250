"""Batches are gathered and scattered so that every request gets exactly its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends import Execution
from remora.backends.arrays import JOIN_LIMIT_BYTES, ArrayInstance, gather, scatter, texts
from remora.errors import InternalError, InvalidArgumentError
from remora.messages import Array, InferForm, InputSpec, Request, Response, Tensor, datatype_of
from remora.proto.model_config_pb2 import ModelConfig

DTYPES = ["?", "u1", "<u2", "<i4", "<i8", "<f2", "<f4", "<f8", "O"]


def request(inputs: dict[str, Array], requested: tuple[str, ...] = ("y",), rows: int | None = None) -> Request:
    specs = tuple(InputSpec(name, datatype_of(array), array.shape) for name, array in inputs.items())
    rows = rows if rows is not None else next(iter(inputs.values())).shape[0]
    return Request(InferForm(specs), inputs, requested, rows, None)


def config(max_batch_size: int = 8, outputs: Sequence[str] = ("y",)) -> ModelConfig:
    made = ModelConfig(name="m", max_batch_size=max_batch_size)
    made.input.add(name="x")
    for name in outputs:
        made.output.add(name=name)
    return made


def numbers(rows: int, shape: tuple[int, ...], dtype: str, start: int) -> Array:
    size = rows * int(np.prod(shape))
    flat = np.arange(start, start + size) % 97
    values = np.array([b"%d" % value for value in flat], object) if dtype == "O" else flat.astype(dtype)
    return values.reshape(rows, *shape)


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    wants=st.lists(st.sampled_from([("same",), ("next",), ("same", "next")]), min_size=40, max_size=40),
)
def test_every_caller_gets_exactly_its_own_rows(
    rows: list[int], shape: tuple[int, ...], dtype: str, wants: list[tuple[str, ...]]
) -> None:
    arrays = [numbers(each, shape, dtype, start) for start, each in enumerate(rows)]
    requests = [request({"x": array}, asked) for array, asked in zip(arrays, wants, strict=False)]

    def run(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        found = {"same": inputs["x"], "next": np.roll(inputs["x"], 1, axis=-1)}
        return [Tensor(name, datatype_of(found[name]), found[name]) for name in wanted]

    instance = ArrayInstance("m_0", config(200, ["same", "next"]), run)
    outcomes = instance.execute(Execution(requests))
    assert len(outcomes) == len(requests)
    for outcome, asked, array in zip(outcomes, requests, arrays, strict=True):
        assert isinstance(outcome, Response)
        assert tuple(tensor.name for tensor in outcome.outputs) == asked.requested
        for tensor in outcome.outputs:
            expected = array if tensor.name == "same" else np.roll(array, 1, axis=-1)
            assert tensor.data.shape == array.shape
            assert tensor.data.dtype == array.dtype
            if tensor.name == "same" or shape:  # rolling a batch of scalars mixes its rows
                np.testing.assert_array_equal(tensor.data, expected)


def test_one_request_keeps_its_own_arrays() -> None:
    array = np.zeros((2, 3), "f4")
    assert gather([request({"x": array})], ["x"])["x"] is array


def test_inputs_that_no_request_has_are_left_out() -> None:
    requests = [request({"x": np.zeros((1, 2), "f4")}) for _ in range(2)]
    assert list(gather(requests, ["x", "mask"])) == ["x"]


@pytest.mark.parametrize("columns", [4, JOIN_LIMIT_BYTES])
def test_arrays_with_gaps_are_gathered(columns: int) -> None:
    arrays = [np.arange(4 * columns, dtype="f4").reshape(2, 2 * columns)[:, ::2] + start for start in range(3)]
    arrays = [arrays[0], arrays[1][::-1], np.asfortranarray(arrays[2])]
    gathered = gather([request({"x": array}) for array in arrays], ["x"])["x"]
    np.testing.assert_array_equal(gathered, np.concatenate(arrays))


def test_rows_are_views_of_the_output() -> None:
    data = np.zeros((3, 2), "f4")
    requests = [request({"x": np.zeros((rows, 1), "f4")}) for rows in (1, 2)]
    for response in scatter([Tensor("y", "FP32", data)], requests, batches=True):
        assert np.shares_memory(response.outputs[0].data, data)


def test_the_output_of_one_request_is_not_sliced() -> None:
    data = np.zeros((3, 2), "f4")
    (response,) = scatter([Tensor("y", "FP32", data)], [request({"x": data})], batches=True)
    assert response.outputs[0].data is data


@pytest.mark.parametrize("data", [np.zeros((3, 2), "f4"), np.zeros((), "f4")])
@pytest.mark.parametrize("rows", [[1, 1], [4]])
def test_an_output_without_a_batch_dimension_is_refused_with_its_shape(data: Array, rows: list[int]) -> None:
    requests = [request({"x": np.zeros((each, 1), "f4")}) for each in rows]
    with pytest.raises(InternalError) as failure:
        scatter([Tensor("y", "FP32", data)], requests, batches=True)
    assert f"output 'y' has shape {list(data.shape)} for a batch of {sum(rows)}" in str(failure.value)


def test_responses_hold_the_outputs_in_the_models_order() -> None:
    def run(_inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        return [Tensor(name, "FP32", np.zeros((2, 1), "f4")) for name in wanted]

    instance = ArrayInstance("m_0", config(8, ["a", "b", "c"]), run)
    array = np.zeros((1, 1), "f4")
    outcomes = instance.execute(Execution([request({"x": array}, ("c", "a")), request({"x": array}, ("b",))]))
    names = [[tensor.name for tensor in each.outputs] for each in outcomes if isinstance(each, Response)]
    assert names == [["a", "c"], ["b"]]


def test_only_requested_outputs_are_computed() -> None:
    asked: list[tuple[str, ...]] = []

    def run(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        asked.append(wanted)
        return [Tensor(name, "FP32", inputs["x"]) for name in wanted]

    instance = ArrayInstance("m_0", config(8, ["a", "b", "c"]), run)
    array = np.zeros((1, 1), "f4")
    instance.execute(Execution([request({"x": array}, ("c",)), request({"x": array}, ("a",))]))
    assert asked == [("a", "c")]


def refuse_negatives(inputs: dict[str, Array], _wanted: tuple[str, ...]) -> list[Tensor]:
    if (inputs["x"] < 0).any():
        raise InvalidArgumentError("no negative values")
    return [Tensor("y", "FP32", inputs["x"])]


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_a_refused_value_fails_its_own_request_alone(max_batch_size: int) -> None:
    instance = ArrayInstance("m_0", config(max_batch_size), refuse_negatives)
    requests = [request({"x": np.full((1, 1), value, "f4")}) for value in (1, -1, 2)]
    first, second, third = instance.execute(Execution(requests))
    assert isinstance(second, InvalidArgumentError)
    assert [each.outputs[0].data[0, 0] for each in (first, third) if isinstance(each, Response)] == [1, 2]


def test_an_exception_of_the_model_becomes_an_internal_error_with_its_cause() -> None:
    def run(_inputs: dict[str, Array], _wanted: tuple[str, ...]) -> list[Tensor]:
        raise ZeroDivisionError("by zero")

    instance = ArrayInstance("m_0", config(), run)
    outcomes = instance.execute(Execution([request({"x": np.zeros((1, 1), "f4")}) for _ in range(2)]))
    for outcome in outcomes:
        assert isinstance(outcome, InternalError)
        assert outcome.from_model
        assert str(outcome) == "ZeroDivisionError: by zero"
        assert isinstance(outcome.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_the_phases_are_timed(max_batch_size: int, requests: int) -> None:
    ticks = count(1)
    instance = ArrayInstance("m_0", config(max_batch_size), refuse_negatives, clock=lambda: next(ticks))
    execution = Execution([request({"x": np.zeros((1, 1), "f4")}) for _ in range(requests)])
    instance.execute(execution)
    assert execution.input_end_ns == 1
    assert execution.output_start_ns == next(ticks) - 1


def test_inputs_of_sequence_controls_and_states_are_gathered() -> None:
    made = config()
    made.sequence_batching.control_input.add(name="START")
    made.sequence_batching.state.add(input_name="state_in", output_name="state_out")
    seen: list[str] = []

    def run(inputs: dict[str, Array], _wanted: tuple[str, ...]) -> list[Tensor]:
        seen.extend(inputs)
        return [Tensor("y", "FP32", inputs["x"])]

    array = np.zeros((1, 1), "f4")
    inputs = {"x": array, "START": array, "state_in": array}
    ArrayInstance("m_0", made, run).execute(Execution([request(inputs), request(inputs)]))
    assert seen == ["x", "START", "state_in"]


def test_invalid_utf8_is_reported_with_its_position() -> None:
    assert texts("input 'x'", np.array([["ä".encode()], [b""]], object)) == ["ä", ""]
    with pytest.raises(InvalidArgumentError, match="input 'x' takes UTF-8 text, but element 1 has the byte 0xff at 2"):
        texts("input 'x'", np.array([b"good", b"no\xff", b"no\xff"], object))
