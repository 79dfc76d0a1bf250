"""Tests of ``remora_llm.openai.fields``: no field is dropped silently, and types are strict."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from remora_llm.generation.tasks import ParameterError
from remora_llm.openai.fields import CHAT, COMPLETION, RESPONSE, STREAM_OPTIONS, describe, read_fields


def test_fields_that_are_null_count_as_absent() -> None:
    assert read_fields({"model": "m", "seed": None, "audio": None}, CHAT) == ({"model": "m"}, [])


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ParameterError, match="temprature is not known; did you mean temperature") as caught:
        read_fields({"temprature": 1}, CHAT)
    assert caught.value.parameter == "temprature"


@pytest.mark.parametrize("document", [{"no_such": 1}, {"stream_options": {"no_such": 1}}])
def test_a_refusal_of_an_unknown_field_names_the_way_out_which_then_works(document: Any) -> None:
    with pytest.raises(ParameterError, match="--openai-unknown=ignore"):
        read_fields(document, CHAT)
    _, ignored = read_fields(document, CHAT, ignore_unknown=True)
    assert ignored in (["no_such"], ["stream_options.no_such"])


@pytest.mark.parametrize("name", ["text", "reasoning", "stream_options"])
def test_unknown_members_of_a_responses_objects_are_ignored_by_name(name: str) -> None:
    document = {"input": "a", name: {"other": 1}}
    assert read_fields(document, RESPONSE, ignore_unknown=True) == ({"input": "a", name: {}}, [f"{name}.other"])


def test_unknown_fields_may_be_ignored_by_name() -> None:
    assert read_fields({"model": "m", "other": 1}, CHAT, ignore_unknown=True) == ({"model": "m"}, ["other"])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "1", "must be a number, not a text"),
        ("temperature", True, "must be a number, not a boolean"),
        ("temperature", -1, "between 0 and 2"),
        ("temperature", 2.01, "between 0 and 2"),
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("seed", 1.5, "must be a whole number"),
        ("n", 0, "at least 1"),
        ("stream", "perhaps", "true or false"),
        ("stop", [1], "a text or a list of texts"),
        ("stop_token_ids", ["a"], "a list of whole numbers"),
        ("messages", {}, "must be a list, not an object"),
        ("response_format", "json", "must be an object"),
        ("store", True, "only False is supported"),
        ("modalities", ["audio"], "only text is generated"),
        ("functions", [], "use tools"),
        ("chat_template", "{{ 1 }}", "a template comes from the model only"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        read_fields({name: value}, CHAT)
    assert caught.value.parameter == name


def test_a_field_in_an_object_is_named_with_its_path_and_its_parameter() -> None:
    with pytest.raises(ParameterError, match=r"stream_options\.include_usage") as caught:
        read_fields({"include_usage": 1}, STREAM_OPTIONS, within="stream_options")
    assert caught.value.parameter == "stream_options"


@pytest.mark.parametrize("document", [None, [], 17, "x"])
def test_a_body_that_is_no_object_is_refused(document: Any) -> None:
    with pytest.raises(ParameterError, match="must be a JSON object"):
        read_fields(document, COMPLETION)


def test_a_field_without_a_meaning_here_states_why() -> None:
    tables = {**CHAT, **COMPLETION}
    assert [name for name, field in tables.items() if (field.only or not field.meaning) and not field.why] == []
    assert read_fields({"metadata": {"a": "b"}}, CHAT) == ({}, [])


def test_a_long_value_is_not_repeated_in_the_error() -> None:
    assert describe("x" * 100) == "a text"
    assert describe(None) == "null"


def test_the_page_has_every_field() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "language-models.md").read_text()
    tables = "".join(line for line in page.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`(\w+)`", tables))
    # those that every client sends
    fields = {*CHAT, *COMPLETION, *RESPONSE} - {"model", "prompt"}
    assert sorted(fields - named) == []
