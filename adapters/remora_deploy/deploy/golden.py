"""Golden request of a deployment, whose response decides whether it succeeded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from remora.system.json_text import read_json
from remora_deploy.deploy.plan import Call, CallError, Progress, Step

_RELATIVE = 1e-3
_ABSOLUTE = 1e-5
"""Tolerances, because other processors and runtimes round differently."""
_SHOWN_BYTES = 300


class Golden(NamedTuple):
    """Request body and, optionally, the expected response."""

    body: bytes
    expected: bytes = b""


def golden_step(
    golden: Golden | None, ask: Call, answer_of: Callable[[Any], bytes], undo: tuple[Step, ...] = ()
) -> tuple[Step, ...]:
    """Return the step that sends the golden request and judges its response, if there is one."""
    if golden is None:
        return ()

    def judge(answer: Any) -> Progress:
        try:
            failure = problem_of(answer_of(answer), golden.expected)
        except CallError as error:
            failure = str(error)
        return Progress(failure=f"golden request: {failure}" if failure else "", text="answered as expected")

    return (Step("golden request", ask, until=judge, undo=undo, retries=frozenset({"busy"}), limit_s=300.0),)


def problem_of(body: bytes, expected: bytes) -> str:
    """Return what is wrong with a response, or ""; V2's outputs are compared with a tolerance."""
    try:
        answer = read_json(body)
    except ValueError:
        if expected:
            return "" if body == expected else f"the response is {_short(body)}, expected {_short(expected)}"
        return "" if body else "the response is empty"
    if isinstance(answer, dict) and answer.get("error"):
        return f"the response is an error: {answer['error']}"
    if not expected:
        return ""
    try:
        wanted = read_json(expected)
    except ValueError:
        return "the response is JSON and the expected one is not"
    if isinstance(answer, dict) and isinstance(wanted, dict) and "outputs" in wanted:
        answer, wanted = _outputs(answer), _outputs(wanted)
    return _difference(answer, wanted, "the response")


def _outputs(answer: dict[str, Any]) -> dict[str, Any]:
    found = answer.get("outputs", [])
    return {each.get("name", ""): each.get("data") for each in found if isinstance(each, dict)}


def _difference(got: Any, wanted: Any, where: str) -> str:
    """Return the first difference of two values of JSON, or ""."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        for key, value in wanted.items():
            if key not in got:
                return f"{where} has no {key}"
            problem = _difference(got[key], value, f"{where}'s {key}")
            if problem:
                return problem
        return ""
    if isinstance(wanted, list) and isinstance(got, list):
        if len(got) != len(wanted):
            return f"{where} has {len(got)} values, expected {len(wanted)}"
        found = (
            _difference(one, other, f"{where}[{at}]") for at, (one, other) in enumerate(zip(got, wanted, strict=True))
        )
        return next((problem for problem in found if problem), "")
    if _is_number(wanted) and _is_number(got):
        same = math.isclose(got, wanted, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    else:
        same = type(got) is type(wanted) and got == wanted
    return "" if same else f"{where} is {str(got)[:80]}, expected {str(wanted)[:80]}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(body: bytes) -> str:
    return body[:_SHOWN_BYTES].decode("utf-8", "replace")
