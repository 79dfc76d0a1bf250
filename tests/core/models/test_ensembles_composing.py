"""What ensembles need of other models, and what goes with them [E03, M12, M14]."""

from __future__ import annotations

import pytest

from remora.errors import ConfigError
from remora.models.ensembles import circle, compose, freed_by, step_models
from remora.proto.model_config_pb2 import ModelConfig
from support.engine.fakes import DOUBLER, config_of


def ensemble(*steps: tuple[str, int]) -> ModelConfig:
    """A chain of doublers, each (model, version)."""
    names = ["IN", *(f"t{index}" for index in range(1, len(steps))), "OUT"]
    texts = [
        f'step {{ model_name: "{model}" model_version: {version} '
        f'input_map {{ key: "IN" value: "{names[index]}" }} output_map {{ key: "OUT" value: "{names[index + 1]}" }} }}'
        for index, (model, version) in enumerate(steps)
    ]
    rest = DOUBLER.replace('backend: "fake"', "")
    return config_of(f'name: "e" platform: "ensemble" {rest} ensemble_scheduling {{ {" ".join(texts)} }}')


def doubler(*, decoupled: bool = False) -> ModelConfig:
    return config_of(DOUBLER + f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}")


READY = {"a": {1: doubler(), 3: doubler()}, "b": {1: doubler(decoupled=True)}}


def composed(*steps: tuple[str, int], why: str = "") -> frozenset[str]:
    return compose(ensemble(*steps), lambda name: READY.get(name, {}), lambda _: why)


def test_the_models_of_an_ensemble_are_named_once() -> None:
    assert step_models(ensemble(("a", -1), ("b", -1), ("a", 1))) == ("a", "b")
    assert step_models(doubler()) == ()


def test_an_ensemble_that_fits_tells_which_of_its_models_are_decoupled() -> None:
    assert composed(("a", -1), ("a", 1)) == frozenset()
    assert composed(("a", 3), ("b", 1)) == {"b"}


@pytest.mark.parametrize(
    ("steps", "why", "text"),
    [
        ([("a", 2)], "", "ensemble 'e' depends on 'a' whose required version 2 is not loaded."),
        ([("a", -1), ("gone", -1)], "", "ensemble 'e' depends on 'gone' which has no loaded version."),
        (
            [("gone", 1)],
            "version 1 is at UNAVAILABLE state: Internal: no;\n",
            "ensemble 'e' depends on 'gone' which has no loaded version. Model 'gone' loading failed with error: "
            "version 1 is at UNAVAILABLE state: Internal: no;",
        ),
    ],
)
def test_missing_values_are_reported_with_tritons_text(steps: list[tuple[str, int]], why: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(*steps, why=why)
    assert str(caught.value) == text


def test_a_circle_is_shown() -> None:
    assert circle(("a", "b", "a")).startswith("an ensemble cannot be composed of itself: a -> b -> a.")


@pytest.mark.parametrize(
    ("composition", "implied", "freed"),
    [
        ({"e": ["a", "b"]}, {"a", "b"}, ["a", "b"]),
        ({"e": ["a", "b"]}, {"a"}, ["a"]),
        ({"e": ["a"], "other": ["a"]}, {"a"}, []),
        ({"e": ["inner", "b"], "inner": ["a"]}, {"inner", "a", "b"}, ["inner", "b", "a"]),
        ({"e": ["inner"], "inner": ["a"]}, {"a"}, []),
        ({}, {"a"}, []),
    ],
)
def test_with_an_ensemble_goes_what_was_loaded_for_it_alone(
    composition: dict[str, list[str]], implied: set[str], freed: list[str]
) -> None:
    assert freed_by("e", composition, implied) == freed
