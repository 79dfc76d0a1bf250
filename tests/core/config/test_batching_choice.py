"""The choice of batching for models whose configuration leaves it open."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from remora.calls import TensorInfo
from remora.config.batching_choice import Trial, choose_batching, means_batch

X = TensorInfo("x", "FP32", (-1, 2))
Y = TensorInfo("y", "FP32", (-1, 2))


def choice(axes: Mapping[str, str], trial: Trial = Trial.EQUAL) -> tuple[bool, str]:
    return choose_batching([X], [Y], axes, lambda: trial)


@pytest.mark.parametrize(
    "name", ["batch", "N", "b", "B", "batch_size", "BatchSize", "batch_dim", "num_batches", "bs", "Batch-Size", "n_0"]
)
def test_names_of_a_batch_are_known(name: str) -> None:
    assert means_batch(name)


@pytest.mark.parametrize(
    "name",
    ["seq", "sequence", "time", "tokens", "batch*seq", "batch_seq", "batch_times_length", "num_nodes", "nodes", "", "_",
     "length", "frames", "samples", "points", "height", "num_detections", "NB", "bn_channels"],
)  # fmt: skip
def test_other_names_are_no_batch(name: str) -> None:
    assert not means_batch(name)


@pytest.mark.parametrize("trial", [Trial.EQUAL, Trial.UNKNOWN])
def test_an_axis_that_is_named_batch_everywhere_is_a_batch(trial: Trial) -> None:
    batched, reason = choice({"x": "batch", "y": "batch"}, trial)
    assert batched
    assert "is named 'batch'" in reason


@pytest.mark.parametrize("axes", [{}, {"x": "batch", "y": "batch"}, {"x": "batch"}])
def test_rows_that_depend_on_each_other_are_never_batched(axes: Mapping[str, str]) -> None:
    batched, reason = choice(axes, Trial.DIFFERENT)
    assert not batched
    assert reason == "two rows together give other results than each row alone"


@pytest.mark.parametrize(
    "axes",
    [{}, {"x": "batch"}, {"x": "unk__12", "y": "unk__13"}, {"x": "x_dynamic_axes_1"}, {"y": "Gemmy_dim_0", "x": "N"},
     {"x": "s77", "y": "s77"}, {"x": "DynamicDimension.0"}],
)  # fmt: skip
def test_an_axis_without_a_name_needs_a_trial_that_shows_independent_rows(axes: Mapping[str, str]) -> None:
    assert choice(axes, Trial.EQUAL)[0]
    batched, reason = choice(axes, Trial.UNKNOWN)
    assert not batched
    assert "does not run on generated values" in reason


def test_one_axis_of_another_name_means_no_batching_and_no_trial() -> None:
    def never() -> Trial:
        raise AssertionError("the names decide")

    assert choose_batching([X], [Y], {"x": "batch", "y": "seq"}, never) == (
        False,
        "the first axis of 'y' is named 'seq', which does not mean a batch",
    )
    assert choose_batching([X], [Y], {"x": "batch", "y": "N"}, never) == (
        False,
        "the first axis of 'x' is named 'batch', and that of 'y' 'N'",
    )
    fixed = TensorInfo("y", "FP32", (3, 2))
    assert choose_batching([X], [fixed], {"x": "batch"}, never) == (False, "the first axis of 'y' has the size 3")
    unknown = TensorInfo("y", "FP32", ())
    assert choose_batching([X], [unknown], {"x": "batch"}, never) == (False, "the first axis of 'y' does not exist")


def test_the_sentence_says_what_would_change_the_choice() -> None:
    assert choose_batching([X], [Y], {"x": "seq"}, lambda: Trial.EQUAL).sentence(0) == (
        "requests are not batched, because the first axis of 'x' is named 'seq', which does not mean a batch; set "
        "max_batch_size to batch them"
    )
