"""Flags made from option dataclasses, in the forms that Triton takes (spec V05)."""

from __future__ import annotations

import argparse

import pytest

from remora.cli import add_options, read_options
from remora.options import EngineOptions, ServerOptions


def options_of(*arguments: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_options(parser, EngineOptions)
    options = read_options(parser.parse_args(arguments), EngineOptions())
    assert isinstance(options, EngineOptions)
    return options


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("TRUE", True), ("On", True), ("1", True), ("false", False), ("off", False), ("0", False)],
)
def test_a_boolean_has_tritons_spellings(word: str, value: bool) -> None:
    assert options_of(f"--strict-readiness={word}").strict_readiness is value


@pytest.mark.parametrize("word", ["yes", "2", ""])
def test_another_spelling_of_a_boolean_is_refused(word: str) -> None:
    with pytest.raises(SystemExit):
        options_of(f"--strict-readiness={word}")


@pytest.mark.parametrize("word", ["explicit", "EXPLICIT", "Explicit"])
def test_a_choice_may_be_in_any_case(word: str) -> None:
    assert options_of(f"--model-control-mode={word}").model_control_mode == "explicit"


@pytest.mark.parametrize(("word", "level"), [("3", 3), ("True", 1), ("false", 0)])
def test_the_verbose_level_may_be_a_boolean(word: str, level: int) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ServerOptions)
    options = read_options(parser.parse_args([f"--log-verbose={word}"]), ServerOptions())
    assert options.log_verbose == level


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit):
        options_of("--model-control-mode=never")
