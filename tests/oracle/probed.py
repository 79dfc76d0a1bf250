"""Probes of ``pb_utils``: expressions that a Python model evaluates in a real Triton and here, as recorded and changed.

First come the recorded expressions, whose verdicts must be Triton's or listed as a difference, then changed ones: an
argument is replaced by one of another recorded expression.
"""

from __future__ import annotations

import ast
import collections
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mutated import SILENCE, Accepted, Difference, Pair, shown

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.programs.pb_utils_probes import DIFFERENCES, TRITON, write_model

NAME = "pb_utils"
PATIENCE_S = 10
TRIES = 3


class Probes:
    """Recorded expressions and changes of them, asked until a time."""

    path = Path(NAME)

    def __init__(self, replay: ModuleType, oracle: Path, seed: str) -> None:
        self._replay, self._oracle = replay, oracle
        self._dice = random.Random(f"{NAME} {seed}")
        self._equal = [expression for expression in TRITON if expression not in DIFFERENCES]
        self._arguments = sorted({text for expression in self._equal for text in arguments(expression)})
        self._died: collections.Counter[str] = collections.Counter()
        self.asked = self.deaths = 0

    def accepted(self) -> list[Accepted]:
        """Return the listed differences of recorded expressions."""
        return [
            Accepted(known["reason"], case=f"^{re.escape(expression)}$", ours=f"{re.escape(known['remora'])}$")
            for expression, known in DIFFERENCES.items()
        ]

    def differences(self, seconds: float) -> Iterator[Difference]:
        """Yield differences of all recorded expressions, then of changed ones while there is time."""
        until, recorded = 0.0, list(reversed(TRITON))
        with tempfile.TemporaryDirectory(prefix="probes-") as folder:
            write_model(Path(folder))
            while not until or recorded or time.monotonic() < until:
                with Pair(self._replay, self._oracle, {"models": ["probe"]}, Path(folder)) as pair:
                    until = until or time.monotonic() + seconds
                    yield from self._rounds(pair, recorded, until)

    def _rounds(self, pair: Pair, recorded: list[str], until: float) -> Iterator[Difference]:
        """Ask until a process of one of the two has died."""
        while recorded or time.monotonic() < until:
            expression = recorded.pop() if recorded else self.changed()
            self.asked += 1
            (theirs,), (ours,) = pair.answers(self._replay, [case(expression)])
            want, got = verdict(theirs), verdict(ours)
            dead = pair.dead()
            if "triton" in dead or "failure" in theirs or SILENCE.search(want):
                self.deaths += 1
                if expression in TRITON and self._died[expression] < TRIES:  # Triton's metrics crash it now and then
                    self._died[expression] += 1
                    recorded.append(expression)
            elif want != got:
                yield Difference(expression, expression, want, got, f"expected {want} got {got}"[:300])
            if dead or "failure" in theirs or "failure" in ours:
                return

    def changed(self) -> str:
        """Return a recorded expression with an argument of another one."""
        expression = self._dice.choice(self._equal)
        found = arguments(expression)
        if not found:
            return expression
        return expression.replace(self._dice.choice(found), self._dice.choice(self._arguments), 1)


def arguments(expression: str) -> list[str]:
    """Return the texts of all arguments of calls of ``pb_utils`` in an expression."""
    calls = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func).startswith("pb_utils.")]
    values = [value for call in ours for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    return [text for value in values if (text := ast.get_source_segment(expression, value))]


def case(expression: str) -> dict[str, Any]:
    """Return a request to evaluate an expression."""
    tensor = {"name": "EXPRESSION", "shape": [1], "datatype": "BYTES", "data": [expression]}
    return {
        "id": expression,
        "method": "POST",
        "path": "/v2/models/probe/infer",
        "body": json.dumps({"inputs": [tensor]}),
        "timeout_s": PATIENCE_S,
        "compare": "json",
        "answer": {},
    }


def verdict(answer: dict[str, Any]) -> str:
    """Return what became of an expression, or the failed response."""
    try:
        return str(json.loads(answer["body"])["outputs"][0]["data"][0])
    except (KeyError, ValueError):
        return shown(answer)
