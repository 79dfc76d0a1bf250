"""Where the time of a start went: the ledger, and what it says. Pure: times are given to it, by whoever spent them.

The phases follow each other without a gap from the process's first moment until it is ready, so that they sum to the
whole. What went on beside them (models load while the server is still being imported) is told by steps: when each
began, and how long it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SLOW_IMPORT_NS = 20_000_000
"""Imports that took less are not told."""


class Phase(NamedTuple):
    """A stretch of the start, in ns since it began."""

    name: str
    begin_ns: int
    end_ns: int


class StartStep(NamedTuple):
    """Something that was done for a model (or, with ``model`` empty, for all of a repository).

    ``what``: list, download (or cache, when nothing had to come), config, session or warmup. ``bytes`` are those that
    came; they are checked while they come.
    """

    model: str
    what: str
    begin_ns: int
    end_ns: int
    bytes: int = 0


class Imported(NamedTuple):
    """A module, and what it imported in its turn."""

    module: str
    begin_ns: int
    end_ns: int
    within: str = ""


class StartupReport(NamedTuple):
    """A start so far. ``first_answer_ns`` is 0 until a request was answered; all times are since the start began."""

    ready: bool
    total_ns: int
    phases: Sequence[Phase]
    steps: Sequence[StartStep]
    imports: Sequence[Imported]
    first_answer_ns: int = 0


class Ledger:
    """Keeps the times of one start. Any thread may tell it of steps; phases are told by the one that starts.

    Args:
        now_ns: the clock that all times are read from.
        began_ns: when the start began by that clock; now, when not given.
    """

    def __init__(self, now_ns: Callable[[], int], began_ns: int | None = None) -> None:
        self.now_ns = now_ns
        self._began_ns = now_ns() if began_ns is None else began_ns
        self._phases: list[Phase] = []
        self._steps: list[StartStep] = []
        self._imports: list[Imported] = []
        self._ready = False
        self._first_answer_ns = 0

    def mark(self, name: str, at_ns: int | None = None) -> None:
        """What went on since the last mark was this, until ``at_ns`` or now."""
        if not self._ready:
            begin_ns = self._phases[-1].end_ns if self._phases else 0
            end_ns = (self.now_ns() if at_ns is None else at_ns) - self._began_ns
            self._phases.append(Phase(name, begin_ns, max(begin_ns, end_ns)))

    def ready(self) -> None:
        """The start is over: nothing that is told later belongs to it."""
        self.mark("ready")
        self._ready = True

    def add(self, model: str, what: str, begin_ns: int, size: int = 0) -> None:
        """Tell of a step that began at ``begin_ns`` by the clock, and is done now; see `StartStep`."""
        if not self._ready:
            self._steps.append(StartStep(model, what, begin_ns - self._began_ns, self.now_ns() - self._began_ns, size))

    def imported(self, module: str, begin_ns: int, end_ns: int, within: str) -> None:
        """Tell of an import that took long."""
        self._imports.append(Imported(module, begin_ns - self._began_ns, end_ns - self._began_ns, within))

    def report(self, first_answer_ns: int = 0) -> StartupReport:
        """The start so far; ``first_answer_ns`` is when the first request was answered, 0 for not yet."""
        if first_answer_ns and not self._first_answer_ns:  # a model that is loaded again forgets its own
            self._first_answer_ns = first_answer_ns - self._began_ns
        total_ns = self._phases[-1].end_ns if self._ready else self.now_ns() - self._began_ns
        return StartupReport(
            self._ready,
            total_ns,
            tuple(self._phases),
            tuple(sorted(self._steps, key=lambda step: step.begin_ns)),
            tuple(sorted(self._imports, key=lambda each: each.begin_ns)),
            self._first_answer_ns,
        )


def as_document(report: StartupReport) -> dict[str, Any]:
    """What ``/v2/startup`` shows: times in milliseconds, since the process began."""
    return {
        "ready": report.ready,
        "total_ms": _ms(report.total_ns),
        "phases": [
            {"phase": each.name, "begin_ms": _ms(each.begin_ns), "ms": _ms(each.end_ns - each.begin_ns)}
            for each in report.phases
        ],
        "models": [
            {
                "model": each.model,
                "step": each.what,
                "begin_ms": _ms(each.begin_ns),
                "ms": _ms(each.end_ns - each.begin_ns),
                **(_speed(each) if each.bytes else {}),
            }
            for each in report.steps
        ],
        "imports": [
            {
                "module": each.module,
                "begin_ms": _ms(each.begin_ns),
                "ms": _ms(each.end_ns - each.begin_ns),
                "within": each.within,
            }
            for each in report.imports
        ],
        "first_answer_ms": _ms(report.first_answer_ns) if report.first_answer_ns else None,
    }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def _speed(step: StartStep) -> dict[str, float]:
    return {"bytes": step.bytes, "mb_per_s": round(step.bytes * 1e3 / max(step.end_ns - step.begin_ns, 1), 1)}


def over_budget(report: dict[str, Any], budget_ms: float, before: dict[str, Any] | None = None) -> str:
    """What is wrong with a start that took longer than its budget, in one line; "" when it did not.

    Args:
        report: a start, as `as_document` shows it.
        budget_ms: from the process's first moment until the first answer, or until it was ready if none came.
        before: an earlier start; then the phase that grew most is named, else the longest.
    """
    spent = report["first_answer_ms"] or report["total_ms"]
    if spent <= budget_ms:
        return ""
    phases = {each["phase"]: each["ms"] for each in report["phases"]}
    earlier = {each["phase"]: each["ms"] for each in before["phases"]} if before else {}
    growth = {name: ms - earlier.get(name, 0.0) for name, ms in phases.items()}
    name = max(growth, key=lambda phase: growth[phase])
    told = f"'{name}' took {phases[name]:.0f} ms"
    if before:
        told += f", {growth[name]:.0f} ms more than before"
    steps = sorted(report["models"], key=lambda step: step["ms"], reverse=True)[:1] if name == "models" else []
    told += "".join(f" (most of it: {step['step']} of '{step['model']}', {step['ms']:.0f} ms)" for step in steps)
    return f"the start took {spent:.0f} ms, {spent - budget_ms:.0f} ms over its budget of {budget_ms:.0f} ms: {told}"
