"""Golden tests of a model, read from its ``tests.json``.

A case is a V2 request and its response as JSON: ``inputs`` and ``outputs`` with name, shape, datatype and data, and a
``tolerance`` with ``absolute`` and ``relative``. Values other than floats must be equal.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from remora.errors import ConfigError, InvalidArgumentError, RemoraError
from remora.messages import DTYPES, Array, InferForm, InputSpec, Outcome, OutputSpec, Response
from remora.model_files import GOLDEN_TESTS
from remora.models.served_model import ServedModel
from remora.repository import ModelFolder
from remora.system.clock import Clock
from remora.system.json_text import read_json

MAX_CASES = 1000
_SHOWN = 3
"""Number of values of an output in a diff."""


class GoldenCase(NamedTuple):
    """A request and its expected response."""

    name: str
    inputs: Mapping[str, tuple[str, Array]]
    outputs: Mapping[str, tuple[str, Array]]
    absolute: float = 0.0
    relative: float = 0.0

    def form(self) -> tuple[InferForm, list[Array]]:
        """Return the request."""
        specs = tuple(InputSpec(name, datatype, array.shape) for name, (datatype, array) in self.inputs.items())
        form = InferForm(specs, tuple(OutputSpec(name) for name in self.outputs), self.name)
        return form, [array for _, array in self.inputs.values()]


class GoldenSuite(NamedTuple):
    """All golden tests of a model.

    ``max_slowdown`` limits the run time relative to the replaced version; 0 means no limit.
    """

    cases: tuple[GoldenCase, ...]
    max_slowdown: float = 0.0


def read_suite(text: str | bytes) -> GoldenSuite:
    """Parse a suite. Raises ConfigError, with the place, for invalid content."""
    try:
        document = read_json(text)
    except ValueError as error:
        raise ConfigError(f"{GOLDEN_TESTS}: not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("tests"), list):
        raise ConfigError(f'{GOLDEN_TESTS}: expected {{"tests": [...], "max_slowdown": 1.5}}')
    rows = document["tests"]
    if len(rows) > MAX_CASES:
        raise ConfigError(f"{GOLDEN_TESTS}: {len(rows)} tests, at most {MAX_CASES} are run")
    unknown = document.keys() - {"tests", "max_slowdown"}
    if unknown:
        raise ConfigError(f"{GOLDEN_TESTS}: unknown key '{min(unknown)}': there are 'tests' and 'max_slowdown'")
    return GoldenSuite(
        tuple(_case(row, index) for index, row in enumerate(rows)),
        _number(document.get("max_slowdown", 0), "max_slowdown"),
    )


def _case(row: Any, index: int) -> GoldenCase:
    where = f"tests[{index}]"
    if not isinstance(row, dict):
        raise ConfigError(f"{GOLDEN_TESTS}: {where}: expected an object with inputs and outputs")
    tolerance = row.get("tolerance", {})
    if not isinstance(tolerance, dict):
        raise ConfigError(f'{GOLDEN_TESTS}: {where}.tolerance: expected {{"absolute": 1e-6, "relative": 1e-5}}')
    return GoldenCase(
        str(row.get("name", index)),
        _tensors(row.get("inputs"), f"{where}.inputs"),
        _tensors(row.get("outputs"), f"{where}.outputs"),
        _number(tolerance.get("absolute", 0), f"{where}.tolerance.absolute"),
        _number(tolerance.get("relative", 0), f"{where}.tolerance.relative"),
    )


def _tensors(rows: Any, where: str) -> dict[str, tuple[str, Array]]:
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{GOLDEN_TESTS}: {where}: expected a list of tensors with name, shape, datatype and data")
    found: dict[str, tuple[str, Array]] = {}
    for index, row in enumerate(rows):
        try:
            name, datatype = str(row["name"]), str(row["datatype"])
            found[name] = (datatype, _array(row["data"], datatype).reshape([int(dim) for dim in row["shape"]]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{GOLDEN_TESTS}: {where}[{index}]: {type(error).__name__}: {error}") from error
    return found


def _array(data: Any, datatype: str) -> Array:
    if datatype not in DTYPES or datatype == "BF16":
        raise ValueError(f"datatype '{datatype}' cannot be written in {GOLDEN_TESTS}")
    dtype = DTYPES[datatype]
    if not dtype.hasobject:
        return np.asarray(data, dtype).reshape(-1)
    flat = np.asarray(data, object).reshape(-1)
    out = np.empty(len(flat), object)
    out[:] = [str(text).encode() for text in flat]
    return out


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{GOLDEN_TESTS}: {where}: expected a number from 0, got {json.dumps(value)[:40]}")
    return float(value)


# -- comparison -------------------------------------------------------------------------------------------------------


def differences(case: GoldenCase, answer: Mapping[str, Array]) -> list[str]:
    """Return one line per output that differs from the expected response."""
    lines: list[str] = []
    for name, (_, wanted) in case.outputs.items():
        actual = answer.get(name)
        if actual is None:
            lines.append(f"{name} is missing")
        elif actual.shape != wanted.shape:
            lines.append(f"{name} has shape {list(actual.shape)}, expected {list(wanted.shape)}")
        else:
            lines += _value_differences(name, actual, wanted, case)
    return lines


def _value_differences(name: str, actual: Array, wanted: Array, case: GoldenCase) -> list[str]:
    if wanted.dtype.kind == "f" and actual.dtype.kind == "f":
        same = np.isclose(actual, wanted, rtol=case.relative, atol=case.absolute, equal_nan=True)
    else:
        same = np.asarray(actual == wanted)
    places = np.argwhere(~same.astype(bool))
    if not len(places):
        return []
    shown = []
    for place in places[:_SHOWN].tolist():
        at = tuple(place)
        off = f" (off by {abs(float(actual[at]) - float(wanted[at])):.3g})" if wanted.dtype.kind == "f" else ""
        shown.append(f"{name}{place} is {actual[at]}, expected {wanted[at]}{off}")
    more = f"; {len(places)} of {wanted.size} values of {name} differ" if len(places) > _SHOWN else ""
    return ["; ".join(shown) + more]


def too_slow(suite: GoldenSuite, taken_ns: Sequence[int], before_ns: Sequence[int]) -> str:
    """Return why a model is too slow for its suite, or "" if it is not.

    Args:
        suite: has the limit.
        taken_ns: the best time of each case.
        before_ns: the same for the version that it would replace.
    """
    now, before = sum(taken_ns), sum(before_ns)
    if not suite.max_slowdown or not before or now <= suite.max_slowdown * before:
        return ""
    return (
        f"{now / 1e6:.3f} ms for all cases where the version that serves takes {before / 1e6:.3f} ms: "
        f"{now / before:.2f} times as long, at most {suite.max_slowdown:g} are allowed"
    )


_log = logging.getLogger("remora.models")

FILE_LIMIT_BYTES = 64 << 20
ANSWER_LIMIT_S = 600
_RUNS = 3
"""Number of runs of a case whose time is compared; the best one counts."""
_SHOWN_FAULTS = 5


def check(model: ServedModel, folder: ModelFolder, before: ServedModel | None, clock: Clock) -> None:
    """Run the golden tests of a model, if it has any.

    Args:
        model: loaded and warmed up, not serving yet.
        folder: its folder.
        before: the serving version that it would replace.
        clock: measures response times.

    Raises:
        InvalidArgumentError: wrong responses, with the differences, or too slow.
        ConfigError: the file is invalid.
    """
    path = folder.path / GOLDEN_TESTS
    if folder.versions[model.version].is_file() or not path.is_file():
        return
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise ConfigError(f"{GOLDEN_TESTS} has {path.stat().st_size} bytes; the limit is {FILE_LIMIT_BYTES}")
    suite = read_suite(path.read_bytes())
    if model.decoupled or model.config.HasField("sequence_batching"):
        raise ConfigError(f"{GOLDEN_TESTS} is for models that give each request one answer, whatever came before it")
    try:
        _judge(model, suite, before, clock)
    finally:
        model.statistics.forget()
    _log.info("model '%s' version %d passed %d golden tests", model.name, model.version, len(suite.cases))


def _judge(model: ServedModel, suite: GoldenSuite, before: ServedModel | None, clock: Clock) -> None:
    failures: list[str] = []
    for case in suite.cases:
        try:
            found = differences(case, _answer(model, case))
        except RemoraError as error:
            found = [f"it failed: {error}"]
        failures += [f"'{case.name}': {line}" for line in found]
    if failures:
        more = f" (and {len(failures) - _SHOWN_FAULTS} more)" if len(failures) > _SHOWN_FAULTS else ""
        raise InvalidArgumentError(
            f"{len(failures)} differences in the golden tests of {GOLDEN_TESTS}: "
            f"{' | '.join(failures[:_SHOWN_FAULTS])}{more}"
        )
    if suite.max_slowdown and before is not None and before is not model:
        slow = too_slow(suite, *(_times(each, suite, clock) for each in (model, before)))
        if slow:
            raise InvalidArgumentError(f"too slow in the golden tests of {GOLDEN_TESTS}: {slow}")


def _times(model: ServedModel, suite: GoldenSuite, clock: Clock) -> list[int]:
    """Return the best time of each case in ns, empty if the model cannot answer them."""
    times: list[int] = []
    for case in suite.cases:
        best = 0
        for _ in range(_RUNS):
            begin_ns = clock.monotonic_ns()
            try:
                _answer(model, case)
            except RemoraError:
                return []
            taken_ns = clock.monotonic_ns() - begin_ns
            best = min(best, taken_ns) if best else taken_ns
        times.append(best)
    return times


def _answer(model: ServedModel, case: GoldenCase) -> dict[str, Array]:
    """Return the outputs by name. Raises RemoraError."""
    answers: SimpleQueue[Outcome] = SimpleQueue()
    form, data = case.form()
    ticket = model.run_uncached(form, data, lambda _ticket, outcome: answers.put(outcome))
    try:
        outcome = answers.get(timeout=ANSWER_LIMIT_S)
    except Empty:
        ticket.cancel()
        raise InvalidArgumentError(f"no answer within {ANSWER_LIMIT_S} s") from None
    if isinstance(outcome, RemoraError):
        raise outcome
    assert isinstance(outcome, Response)  # `check` refuses decoupled models
    return {tensor.name: tensor.data for tensor in outcome.outputs}
