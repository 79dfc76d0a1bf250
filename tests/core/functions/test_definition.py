"""Definitions of models: signatures, settings and the errors of both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple, TypedDict

import pytest

import remora
from remora.functions.definition import Model, ModelDefinitionError, Pipeline, model, seconds


class Scores(NamedTuple):
    label: str
    score: float


class Found(TypedDict):
    label: str
    score: float


def _signature(function: Callable[..., Any], **settings: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    signature = model(**settings)(function).signature
    return (
        [(each.name, each.kind.datatype) for each in signature.inputs],
        [(each.name, each.kind.datatype) for each in signature.outputs],
    )


def test_a_decorated_function_stays_a_function() -> None:
    @remora.model
    def double(x: float) -> float:
        """Double a number."""
        return 2 * x

    assert isinstance(double, Model)
    assert (double(1.5), double.name, double.__doc__) == (3.0, "double", "Double a number.")


def test_parameters_are_inputs_and_the_result_is_output() -> None:
    def classify(text: str, top: int = 3) -> dict[str, float]:
        return {}

    assert _signature(classify) == ([("text", "BYTES"), ("top", "INT64")], [("output", "BYTES")])
    assert [each.optional for each in model(classify).signature.inputs] == [False, True]


def test_a_function_without_hints_takes_and_returns_json() -> None:
    def plain(value):  # type: ignore[no-untyped-def]
        return value

    signature = model(plain).signature
    assert signature.inputs[0].kind.is_json
    assert signature.outputs[0].kind.is_json


@pytest.mark.parametrize("result", [Scores, Found])
def test_named_results_are_outputs_of_those_names(result: Any) -> None:
    def classify(text: str) -> Any:
        return ("a", 0.5)

    classify.__annotations__["return"] = result
    built = model(classify)
    assert [each.name for each in built.signature.outputs] == ["label", "score"]
    assert built.signature.pack({"label": "a", "score": 0.5}) == ("a", 0.5)
    assert built.signature.pack(("a", 0.5)) == ("a", 0.5)
    with pytest.raises(ValueError, match="expected a tuple of 2 values, got 1 values"):
        built.signature.pack(("a",))


def test_a_tuple_has_numbered_outputs() -> None:
    def both(x: float) -> tuple[float, str]:
        return x, ""

    assert _signature(both)[1] == [("output0", "FP64"), ("output1", "BYTES")]


def test_generators_are_streams_of_their_items() -> None:
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    async def later(n: int) -> AsyncIterator[str]:
        yield "x"

    def returned(n: int) -> Iterator[int]:
        return iter(range(n))

    def unnamed(n: int) -> Any:
        return iter(range(n))

    assert model(count).settings.stream
    assert model(later).settings.stream
    assert model(later).is_async
    assert model(returned).settings.stream
    assert not model(unnamed).settings.stream
    assert model(stream=True)(unnamed).settings.stream
    assert _signature(count)[1] == [("output", "INT64")]
    assert _signature(later)[1] == [("output", "BYTES")]
    assert _signature(returned)[1] == [("output", "INT64")]


def test_a_class_is_created_and_set_up_once_for_each_instance() -> None:
    @model(name="counter")
    class Counter:
        def __init__(self) -> None:
            self.devices: list[str] = []

        def setup(self, device: str) -> None:
            self.devices.append(device)

        def predict(self, x: int) -> int:
            return x + len(self.devices)

    assert Counter.name == "counter"
    assert [each.name for each in Counter.signature.inputs] == ["x"]
    run = Counter.open("cuda:1")
    assert run(x=1) == 2
    assert run.__self__.devices == ["cuda:1"]  # type: ignore[attr-defined]
    assert Counter.open("cpu").__self__ is not run.__self__  # type: ignore[attr-defined]


def test_setup_gives_a_function_its_first_argument() -> None:
    made: list[int] = []

    def load() -> int:
        made.append(1)
        return 10

    @model(setup=load)
    def add(state: int, x: int) -> int:
        return state + x

    assert [each.name for each in add.signature.inputs] == ["x"]
    run = add.open("cpu")
    assert (run(x=1), run(x=2), len(made)) == (11, 12, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "a/b"}, "'a/b' is not a model name"),
        ({"name": "../x"}, "is not a model name"),
        ({"batch": -1}, "batch=-1"),
        ({"instances": 0}, "instances=0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"isolation": "container"}, "isolation='container': expected process or thread"),
        ({"device": "tpu"}, "device='tpu': expected auto, cpu or gpu"),
        ({"max_delay": 0.1}, "max_delay needs batch=N"),
        ({"batch": 4, "max_delay": 7200}, "expected 0 to 3600 seconds"),
        ({"batch": 4, "stream": True}, "a stream answers one request"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_place_of_the_function(settings: dict[str, Any], text: str) -> None:
    def run(x: float) -> float:
        return x

    with pytest.raises(ModelDefinitionError, match=text) as error:
        model(**settings)(run)
    assert "test_definition.py" in str(error.value)


def _star(*values: float) -> float:
    return 0


def _nothing(x: float) -> None:
    return None


def _unresolved(x: "Missing") -> float:  # type: ignore[name-defined]  # noqa: F821, UP037
    return 0


@pytest.mark.parametrize(
    ("function", "text"),
    [(_star, "'values' has no fixed name"), (_nothing, "returns None"), (_unresolved, "'Missing' is not defined")],
)
def test_a_signature_without_tensors_is_refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(ModelDefinitionError, match=text):
        model(function)


def test_a_class_needs_a_method_to_call() -> None:
    with pytest.raises(ModelDefinitionError, match="has no method predict or __call__"):
        model(type("Empty", (), {}))
    with pytest.raises(ModelDefinitionError, match="needs a function or a class, got int"):
        model()(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), [("2ms", 0.002), ("500us", 0.0005), ("1.5s", 1.5), (0.25, 0.25)])
def test_a_delay_is_a_number_of_seconds_or_has_a_unit(text: Any, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["2", "ms", "2 minutes", "-2ms"])
def test_a_delay_without_unit_is_refused(text: str) -> None:
    with pytest.raises(ModelDefinitionError, match="expected seconds"):
        seconds(text)


# -- pipelines -------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    ids: list[int]
    mask: list[int]


@model
def tokenize(text: str) -> Parts:
    return Parts([len(text)], [1])


@model
def score(mask: list[int], ids: list[int]) -> float:
    return float(sum(ids))


@model
def shown(value: float) -> str:
    return str(value)


@model(batch=8)
def batched(value: list[float]) -> list[float]:
    return value


def test_tensors_of_equal_names_are_connected_and_a_single_output_goes_to_a_single_input() -> None:
    pipeline = tokenize >> score >> shown
    assert [step.model.name for step in pipeline.steps] == ["tokenize", "score", "shown"]
    assert list(pipeline.inputs()) == ["text"]
    assert list(pipeline.outputs()) == ["output"]
    assert pipeline.outputs()["output"].kind.datatype == "BYTES"
    first, second, third = pipeline.steps
    assert second.inputs == {"mask": first.outputs["mask"], "ids": first.outputs["ids"]}
    assert third.inputs == {"value": second.outputs["output"]}


def test_two_pipelines_are_joined_in_order() -> None:
    joined = (tokenize >> score) >> (shown >> tokenize)
    assert [each.model.name for each in joined.steps] == ["tokenize", "score", "shown", "tokenize"]


def test_wired_steps_name_the_tensors_of_a_graph() -> None:
    graph = Pipeline(
        tokenize.wire(text="question"), score.wire(output="points"), shown.wire(value="points", output="answer")
    )
    assert list(graph.inputs()) == ["question"]
    assert list(graph.outputs()) == ["answer"]
    assert graph.models() == (tokenize, score, shown)


def test_an_unknown_tensor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelDefinitionError, match="no input or output 'txt'; it has text, ids, mask"):
        tokenize.wire(txt="question")


def test_models_whose_tensors_do_not_match_are_refused() -> None:
    with pytest.raises(ModelDefinitionError, match="cannot connect 'tokenize' with 'shown'"):
        tokenize >> shown


def test_a_pipeline_batches_only_if_all_steps_do() -> None:
    assert (batched >> batched).batch() == 8
    assert (tokenize >> score).batch() == 0
    with pytest.raises(ModelDefinitionError, match="give 'score' batch= too"):
        Pipeline(score, batched, name="mixed").batch()


def test_a_misspelled_setting_of_the_decorator_has_a_hint() -> None:
    with pytest.raises(ModelDefinitionError, match=r"@remora.model has no setting 'batsh'; did you mean batch\?"):
        model(batsh=4)  # type: ignore[call-overload]
