"""The signature of an ensemble from its models, and the errors when they are unloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remora.errors import NotFoundError, RemoraError
from remora.scheduling.ensembles import scheduler as ensemble_ends
from remora.signature import UnreadableError
from support.engine.fakes import config_of

ENSEMBLE = """
name: "e" platform: "ensemble"
input { name: "TEXT" data_type: TYPE_STRING dims: 1 } output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling {
  step { model_name: "reader" input_map { key: "I" value: "TEXT" } output_map { key: "O" value: "mid" } }
  step { model_name: "giver" input_map { key: "J" value: "mid" } output_map { key: "P" value: "OUT" } }
}
"""
TORN = UnreadableError("TEXT", 9, 2)
TOLD = "in ensemble 'e', incomplete string data for inference input 'I', expecting string of length 9 but only 2 bytes "


class Model:
    """Answers, and counts how often it is lent."""

    def __init__(self) -> None:
        self.lent = 0
        self.read: list[str] = []

    def labels_of(self, output: str) -> Sequence[str]:
        return (f"label of {output}",)

    def unreadable(self, error: UnreadableError) -> RemoraError:
        self.read.append(error.input)
        return error

    def release(self) -> None:
        self.lent -= 1


class Models:
    def __init__(self, **models: Model) -> None:
        self.models = models

    def acquire(self, name: str, version: int = -1) -> Any:
        if name not in self.models:
            raise NotFoundError("it has gone")
        self.models[name].lent += 1
        return self.models[name]


def test_the_model_that_gives_an_output_names_its_classes_and_is_given_back() -> None:
    giver = Model()
    assert ensemble_ends.labels_of(config_of(ENSEMBLE), Models(giver=giver), "OUT") == ("label of P",)
    assert giver.lent == 0


def test_the_model_that_reads_an_input_words_its_error_and_is_released() -> None:
    reader = Model()
    said = ensemble_ends.unreadable(config_of(ENSEMBLE), Models(reader=reader), TORN)
    assert said.message.startswith(TOLD)
    assert said.from_model
    assert (reader.read, reader.lent) == (["I"], 0)


def test_a_missing_model_has_no_labels_and_the_error_keeps_its_wording() -> None:
    assert ensemble_ends.labels_of(config_of(ENSEMBLE), Models(), "OUT") == ()
    assert ensemble_ends.unreadable(config_of(ENSEMBLE), Models(), TORN).message.startswith(TOLD)


def test_a_tensor_without_a_step_has_no_labels_and_keeps_its_error() -> None:
    assert ensemble_ends.labels_of(config_of(ENSEMBLE), Models(), "mid and more") == ()
    other = UnreadableError("OTHER", 9, 2)
    assert ensemble_ends.unreadable(config_of(ENSEMBLE), Models(), other) is other
