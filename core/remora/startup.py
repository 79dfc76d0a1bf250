"""Startup ledger: phases, steps and imports of a startup with their durations.

The phases follow each other without a gap from the start of the process until it is ready, so that they sum to the
total. Concurrent work (models load while the server is still being imported) is recorded as steps. Pure: all times are
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SLOW_IMPORT_NS = 20_000_000
"""Minimum duration of a recorded import."""


class Phase(NamedTuple):
    """A phase of the startup, in nanoseconds since it began."""

    name: str
    begin_ns: int
    end_ns: int


class StartStep(NamedTuple):
    """A step for one model, or with an empty ``model`` for a whole repository.

    ``what``: list, download (or cache, if nothing was downloaded), config, session or warmup. ``bytes`` is the
    downloaded size. Verification happens during the download.
    """

    model: str
    what: str
    begin_ns: int
    end_ns: int
    bytes: int = 0


class Imported(NamedTuple):
    """A module import, and the module that it was nested in."""

    module: str
    begin_ns: int
    end_ns: int
    within: str = ""


class StartupReport(NamedTuple):
    """The startup so far.

    ``first_answer_ns`` is 0 before the first answer. All times are relative to the begin of the startup.
    """

    ready: bool
    total_ns: int
    phases: Sequence[Phase]
    steps: Sequence[StartStep]
    imports: Sequence[Imported]
    first_answer_ns: int = 0


class Ledger:
    """Record of the times of one startup.

    Any thread may add steps; only the starting thread may mark phases.

    Args:
        now_ns: the clock of all times.
        began_ns: begin of the startup on that clock; default now.
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
        """End the current phase at ``at_ns`` or now, and name it."""
        if not self._ready:
            begin_ns = self._phases[-1].end_ns if self._phases else 0
            end_ns = (self.now_ns() if at_ns is None else at_ns) - self._began_ns
            self._phases.append(Phase(name, begin_ns, max(begin_ns, end_ns)))

    def ready(self) -> None:
        """End the startup. Later records are ignored."""
        self.mark("ready")
        self._ready = True

    def add(self, model: str, what: str, begin_ns: int, size: int = 0) -> None:
        """Record a step that began at ``begin_ns`` and ends now. See `StartStep`."""
        if not self._ready:
            self._steps.append(StartStep(model, what, begin_ns - self._began_ns, self.now_ns() - self._began_ns, size))

    def imported(self, module: str, begin_ns: int, end_ns: int, within: str) -> None:
        """Record a slow import."""
        self._imports.append(Imported(module, begin_ns - self._began_ns, end_ns - self._began_ns, within))

    def report(self, first_answer_ns: int = 0) -> StartupReport:
        """Return the startup so far.

        ``first_answer_ns`` is the time of the first answer, 0 before that.
        """
        if first_answer_ns and not self._first_answer_ns:  # kept, because reloading a model resets its statistics
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
    """Return the document of ``/v2/startup``, with milliseconds since the process began."""
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


def verdict(report: dict[str, Any], budget_ms: float, starts: int) -> str:
    """Return the time to the first answer in one line, compared with any budget.

    ``budget_ms`` is 0 without a budget; ``report`` is the median of so many ``starts``.
    """
    first_ms = report["first_answer_ms"]
    measured = f"first answer {first_ms / 1e3:.1f} s" if first_ms else f"ready after {report['total_ms'] / 1e3:.1f} s"
    median = f" (median of {starts} starts)" if starts > 1 else ""
    if not budget_ms:
        return measured + median
    relation = "over" if _spent_ms(report) > budget_ms else "within"
    return f"{measured}{median}, {relation} the budget of {budget_ms / 1e3:g} s"


def over_budget(report: dict[str, Any], budget_ms: float, before: dict[str, Any] | None = None) -> str:
    """Return a one-line diagnosis if a startup took longer than its budget, else "".

    Args:
        report: a startup, as returned by `as_document`.
        budget_ms: from the start of the process until the first answer, or until ready if there was no answer.
        before: an earlier startup to compare with; the phase that grew most is then named, else the longest.
    """
    spent = _spent_ms(report)
    if spent <= budget_ms:
        return ""
    phases = {each["phase"]: each["ms"] for each in report["phases"]}
    earlier = {each["phase"]: each["ms"] for each in before["phases"]} if before else {}
    growth = {name: ms - earlier.get(name, 0.0) for name, ms in phases.items()}
    name = max(growth, key=lambda phase: growth[phase])
    diagnosis = f"'{name}' took {phases[name]:.0f} ms"
    if before:
        diagnosis += f", {growth[name]:.0f} ms more than before"
    steps = sorted(report["models"], key=lambda step: step["ms"], reverse=True)[:1] if name == "models" else []
    diagnosis += "".join(f" (most of it: {step['step']} of '{step['model']}', {step['ms']:.0f} ms)" for step in steps)
    over_ms = spent - budget_ms
    return f"the start took {spent:.0f} ms, {over_ms:.0f} ms over its budget of {budget_ms:.0f} ms: {diagnosis}"


def _spent_ms(report: dict[str, Any]) -> float:
    """Return the time until the first answer, or until ready if there was none."""
    return float(report["first_answer_ms"] or report["total_ms"])
