"""Expressions over ``pb_utils`` that `make differ` changes, and what of their differences is listed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutated import Difference
from probed import Probes, arguments, case, verdict

from support.programs.pb_utils_probes import DIFFERENCES, TRITON


def probes(seed: str) -> Probes:
    return Probes(ModuleType("replay"), Path(), seed)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("pb_utils.Tensor('a', np.zeros(1)).name()", ["'a'", "np.zeros(1)"]),
        ("int(np.array(['a']))", []),
        ("pb_utils.TritonError(message='m').code(pb_utils.f(5))", ["pb_utils.f(5)", "'m'", "5"]),
    ],
    ids=["by place", "of other modules", "by name and nested"],
)
def test_the_arguments_of_calls_of_pb_utils_are_found(expression: str, found: list[str]) -> None:
    assert sorted(arguments(expression)) == sorted(found)


def test_the_same_seed_changes_the_same_expressions_into_others_that_can_be_read() -> None:
    one, other = (probes("7"), probes("7"))
    changed = [one.changed() for _ in range(200)]
    assert changed == [other.changed() for _ in range(200)]
    assert len(set(changed) - set(TRITON)) > 100
    for expression in changed:
        compile(expression, "probe", "eval")


def test_a_listed_difference_covers_its_own_verdict_alone() -> None:
    accepted = probes("0").accepted()
    for expression, known in DIFFERENCES.items():
        listed, other = (
            Difference(expression, expression, TRITON[expression], ours, "")
            for ours in (known["remora"], "raises Other")
        )
        assert any(row.covers(listed) for row in accepted)
        assert not any(row.covers(other) for row in accepted)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"status": 200, "body": '{"outputs": [{"data": ["1"]}]}'}, "1"),
        ({"status": 500, "body": '{"error": "x"}'}, '500 {"error": "x"}'),
        ({"failure": "gone"}, " gone"),
    ],
    ids=["verdict", "error", "failure"],
)
def test_a_verdict_is_what_the_model_answered_or_the_failed_response(answer: dict[str, Any], found: str) -> None:
    assert verdict(answer) == found


def test_a_case_asks_the_model_for_one_expression() -> None:
    asked = case("1")
    assert (asked["id"], asked["method"], asked["path"]) == ("1", "POST", "/v2/models/probe/infer")
