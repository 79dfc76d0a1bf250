"""Runs a model's golden tests before it serves; the law: a model that fails them never does.

`golden_tests` says what is right. The cases run as requests do, but past the response cache; what they add to the
statistics of a model that does not serve yet is forgotten, the few runs of the version it is compared with are not.
"""

from __future__ import annotations

import logging
from queue import Empty, SimpleQueue

from remora.errors import ConfigError, InvalidArgumentError, RemoraError
from remora.messages import Array, Outcome, Response
from remora.models.golden_tests import FILENAME, GoldenCase, GoldenSuite, differences, read_suite, too_slow
from remora.models.served_model import ServedModel
from remora.repository import ModelFolder
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

FILE_LIMIT_BYTES = 64 << 20
ANSWER_LIMIT_S = 600
_RUNS = 3
"""How often a case runs where times are compared; the best one counts."""
_SHOWN_FAULTS = 5


def check(model: ServedModel, folder: ModelFolder, before: ServedModel | None, clock: Clock) -> None:
    """Run the cases of the model's folder, if it has any.

    Args:
        model: loaded and warmed up, not serving yet.
        folder: where it lies.
        before: what serves now and would be replaced.
        clock: for how long answers take.

    Raises:
        InvalidArgumentError: the model answers otherwise, or is too slow; the text has the differences.
        ConfigError: the file cannot be used.
    """
    path = folder.path / FILENAME
    if folder.versions[model.version].is_file() or not path.is_file():
        return
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise ConfigError(f"{FILENAME} has {path.stat().st_size} bytes; the limit is {FILE_LIMIT_BYTES}")
    suite = read_suite(path.read_bytes())
    if model.decoupled or model.config.HasField("sequence_batching"):
        raise ConfigError(f"{FILENAME} is for models that give each request one answer, whatever came before it")
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
            f"{len(failures)} differences in the golden tests of {FILENAME}: {' | '.join(failures[:_SHOWN_FAULTS])}{more}"
        )
    if suite.max_slowdown and before is not None and before is not model:
        slow = too_slow(suite, *(_times(each, suite, clock) for each in (model, before)))
        if slow:
            raise InvalidArgumentError(f"too slow in the golden tests of {FILENAME}: {slow}")


def _times(model: ServedModel, suite: GoldenSuite, clock: Clock) -> list[int]:
    """The best time of each case in ns; none when the model cannot answer them, for it cannot be compared then."""
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
    """The outputs by name. Raises RemoraError."""
    answers: SimpleQueue[Outcome] = SimpleQueue()
    form, data = case.form()
    ticket = model.try_out(form, data, lambda _ticket, outcome: answers.put(outcome))
    try:
        outcome = answers.get(timeout=ANSWER_LIMIT_S)
    except Empty:
        ticket.cancel()
        raise InvalidArgumentError(f"no answer within {ANSWER_LIMIT_S} s") from None
    if isinstance(outcome, RemoraError):
        raise outcome
    assert isinstance(outcome, Response)  # decoupled models are refused above
    return {tensor.name: tensor.data for tensor in outcome.outputs}
