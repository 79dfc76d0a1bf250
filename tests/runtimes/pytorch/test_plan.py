"""Triton's rules for names of PyTorch models, and their parameters."""

from __future__ import annotations

import pytest

from remora.errors import ConfigError
from remora_runtimes.pytorch.plan import Bound, bind_inputs, bind_outputs, plan_run
from support.engine.fakes import config_of


def parameters(**given: str) -> str:
    return " ".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in given.items())


@pytest.mark.parametrize(
    ("inputs", "arguments", "expected"),
    [
        (["b", "a"], ["a", "b"], Bound(("a", "b"))),  # names of arguments, whatever their order
        (["b"], ["a", "b"], Bound(keywords=(("b", "b"),))),  # one that has a default is left out
        (["INPUT__1", "INPUT__0"], ["x", "y"], Bound(("INPUT__0", "INPUT__1"))),
        (["left__0", "right__1"], [], Bound(("left__0", "right__1"))),
        (["ARGS[1]", "ARGS[0]"], [], Bound(("ARGS[0]", "ARGS[1]"))),
        (["ARGS[0]", "KWARGS[mask]"], [], Bound(("ARGS[0]",), (("mask", "KWARGS[mask]"),))),
        (["two", "one"], ["x", "y"], Bound(("two", "one"))),  # neither: as configured
        (["one", "two__0"], ["x", "y"], Bound(("one", "two__0"))),  # a mixture: as configured
        ([], ["x"], Bound()),
    ],
)
def test_an_input_stands_for_the_argument_that_its_name_says(
    inputs: list[str], arguments: list[str], expected: Bound
) -> None:
    assert bind_inputs("m", inputs, arguments) == expected


def test_a_program_of_one_dictionary_gets_all_inputs_in_it() -> None:
    assert bind_inputs("m", ["a", "b"], ["inputs"], dictionary=True) == Bound(("a", "b"), as_dictionary=True)


@pytest.mark.parametrize("inputs", [["x__0", "y__0"], ["x__1"], ["x__0", "x__2"]])
def test_places_must_be_given_once_and_without_gaps(inputs: list[str]) -> None:
    with pytest.raises(ConfigError, match="must give each of the places"):
        bind_inputs("m", inputs, ["p", "q"])


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (["OUTPUT__1", "OUTPUT__0"], {"OUTPUT__1": 1, "OUTPUT__0": 0}),
        (["RESULT"], {"RESULT": 0}),
        (["RESULT[0]", "RESULT[1]"], {"RESULT[0]": 0, "RESULT[1]": 1}),
        (["RESULT[boxes]"], {"RESULT[boxes]": "boxes"}),
        (["scores", "boxes"], {"scores": 0, "boxes": 1}),
    ],
)
def test_an_output_stands_for_the_result_that_its_name_says(outputs: list[str], expected: dict[str, int | str]) -> None:
    assert bind_outputs("m", outputs) == expected


def test_two_outputs_cannot_be_one_result() -> None:
    with pytest.raises(ConfigError, match="the same result"):
        bind_outputs("m", ["a__0", "b__0"])


def test_without_parameters_inference_mode_is_on_and_weights_are_shared_only_where_that_is_safe() -> None:
    plan = plan_run(config_of('name: "m"'), {})
    assert (plan.inference_mode, plan.optimized, plan.cudnn) == (True, True, True)
    assert (plan.share_weights, plan.clean_cache, plan.compiling, plan.mixed_precision) == (False, False, None, False)


def test_parameters_are_read_under_tritons_names() -> None:
    text = parameters(
        INFERENCE_MODE="false", DISABLE_OPTIMIZED_EXECUTION="true", DISABLE_CUDNN="true", ENABLE_WEIGHT_SHARING="true",
        ENABLE_CACHE_CLEANING="true", INTER_OP_THREAD_COUNT="3", INTRA_OP_THREAD_COUNT="2", ENABLE_NVFUSER="true",
    )  # fmt: skip
    plan = plan_run(config_of(f'name: "m" {text}'), {})
    assert (plan.inference_mode, plan.optimized, plan.cudnn, plan.share_weights) == (False, False, False, True)
    assert (plan.clean_cache, plan.inter_op_threads, plan.intra_op_threads) == (True, 3, 2)
    assert plan.ignored == ("ENABLE_NVFUSER",)


def test_a_json_object_enables_compilation() -> None:
    def compiling(text: str) -> object:
        config = config_of('name: "m"')
        config.parameters["TORCH_COMPILE_OPTIONAL_PARAMETERS"].string_value = text
        return plan_run(config, {}).compiling

    assert compiling('{"backend": "eager"}') == {"backend": "eager"}
    assert compiling('{"disable": true}') is None
    with pytest.raises(ConfigError, match="must be a JSON object"):
        compiling("[1]")


def test_mixed_precision_is_an_accelerator_and_any_other_is_refused() -> None:
    asked = 'name: "m" optimization { execution_accelerators { gpu_execution_accelerator { name: "%s" } } }'
    assert plan_run(config_of(asked % "auto_mixed_precision"), {}).mixed_precision
    with pytest.raises(ConfigError, match="unknown Execution Accelerator 'tensorrt' is requested"):
        plan_run(config_of(asked % "tensorrt"), {})
