"""Command `remora tune`, which measures the best settings of models for an objective."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from remora.api.http import with_workers
from remora.api.system import keep_runtimes_quiet
from remora.cli.interrupts import INTERRUPTED, open_models, run_aside
from remora.cli.output import columns, warnings_shown, write_whole
from remora.errors import ConfigError
from remora.options import EngineOptions
from remora.system.clock import SystemClock
from remora_tools.tuning import CostTrial, Goal, LoadResult, Plan, Point, Refused, Result, System, Trial
from remora_tools.tuning.configuring import app_of, apply_settings, decorator_of, find_folders, stanza
from remora_tools.tuning.measuring import TrialEngine, loop_in_thread
from remora_tools.tuning.report import (
    Outcome,
    as_document,
    as_html,
    as_plot,
    as_text,
    plan_text,
    point_row,
    table_head,
)
from remora_tools.tuning.search import Search

if TYPE_CHECKING:
    from remora.engine import Engine


def tune(options: argparse.Namespace) -> int:
    """Run the command.

    Returns 1 if no measured configuration holds the objective. Raises RemoraError, UsageError, OSError.
    """
    folders = find_folders(options.models) if options.apply else {}  # before the work, not after it
    goal = Goal(options.slo, options.rate, options.memory, options.budget, options.window)
    begin_ns = SystemClock.monotonic_ns()
    begun: tuple[Search, TrialEngine] | None = None
    interrupted = True
    try:
        with warnings_shown("remora tune"), loop_in_thread() as loop, open_models(_engine(options)) as engine:
            trials = TrialEngine(engine, loop, options)
            begun = Search(trials.system, goal), trials
            interrupted = run_search(*begun, ProgressTable(trials.system, goal, options.quiet))
    except KeyboardInterrupt:  # the second one: the measurement in progress does not count
        if begun is None:
            raise
    search, trials = begun
    seconds = (SystemClock.monotonic_ns() - begin_ns) / 1e9
    outcome = _outcome(search, trials, goal, seconds)
    if sys.stdout.isatty():
        print(as_plot(outcome), end="\n\n")
    print(as_text(outcome))
    _write(options, outcome)
    decision = outcome.decision
    if decision.best is None or not decision.holds:
        return INTERRUPTED if interrupted else 1
    if app := app_of(options.models):
        for space, settings in zip(trials.system.models, decision.best.plan, strict=True):
            print(f"# {space.name}, in {app}\n{decorator_of(settings)}")
    if options.apply and interrupted:
        print("nothing was written, because the search was interrupted: run it again with --apply, or copy the fields")
    elif options.apply:
        _apply(trials, decision.best.plan, folders)
    return 0


def _engine(options: argparse.Namespace) -> Engine:
    from remora.engine import Engine

    keep_runtimes_quiet()
    settings = EngineOptions(
        paths=(options.models,),
        backend_config=tuple(options.backend_config),
        model_control_mode="explicit",
        load_model=tuple(options.model) or ("*",),
    )
    return Engine(options=with_workers(settings))


def run_search(search: Search, trials: TrialEngine, progress: ProgressTable) -> bool:
    """Carry out the trials. Returns True if the user has ended the search after one of them.

    Raises KeyboardInterrupt if the user ends it during a trial.
    """
    interrupted = False
    try:
        with _noted_interrupts() as interrupts:
            while not interrupts and (trial := search.next_trial()) is not None:
                progress.begin(trial, search.spent_s)
                result = run_aside(partial(trials.run, trial))
                search.record(result)
                progress.end(trial, result, search.spent_s)
            interrupted = bool(interrupts)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        if interrupted:
            progress.note("interrupted: this is the best so far")
        progress.close()
    return interrupted


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yield a list that gets the first interrupt, so that a measurement ends in order.

    A second one is raised.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _outcome(search: Search, trials: TrialEngine, goal: Goal, seconds: float) -> Outcome:
    decision = search.decision()
    stanzas: dict[str, str] = {}
    if decision.best is not None and decision.holds:
        for space, settings in zip(trials.system.models, decision.best.plan, strict=True):
            stanzas[space.name] = stanza(settings, trials.configs[space.name], trials.system.cores)
    return Outcome(trials.system, goal, search.points(), decision, stanzas, seconds)


def _write(options: argparse.Namespace, outcome: Outcome) -> None:
    if options.json_file:
        text = json.dumps(as_document(outcome), indent=2)
        write_whole(options.json_file, lambda file: file.write(text.encode()))
    if options.report:
        whole = as_html(f"remora tune {options.models}", outcome)
        write_whole(options.report, lambda file: file.write(whole.encode()))


def _apply(trials: TrialEngine, plan: Plan, folders: dict[str, Any]) -> None:
    """Write the settings that differ from the present ones. Raises ConfigError, OSError."""
    for space, settings in zip(trials.system.models, plan, strict=True):
        if settings == space.present:
            print(f"{space.name}: nothing to write, the present settings are the best")
            continue
        if space.name not in folders:
            raise ConfigError(
                f"model '{space.name}' has no folder here: write the configuration above where it comes from"
            )
        config, cores = trials.configs[space.name], trials.system.cores
        file, copy = apply_settings(folders[space.name], settings, space.present, config, cores)
        print(f"{space.name}: wrote {file}" + (f"; the file with its comments is {copy}" if copy else ""))


class ProgressTable:
    """Measurements on stderr: a table on a terminal, a line for each trial otherwise."""

    def __init__(self, system: System, goal: Goal, quiet: bool) -> None:
        self._system = system
        self._goal = goal
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._rows: list[tuple[str, ...]] = []
        self._drawn = 0
        self._costs = 0
        self._spent_s = 0.0

    def begin(self, trial: Trial, spent_s: float) -> None:
        """Show what is being measured, and the part of the budget that is used."""
        self._spent_s = spent_s
        if self._terminal:
            self._draw(f"measuring {self._text(trial)} ...")

    def end(self, trial: Trial, result: Result, spent_s: float) -> None:
        """Show a result."""
        self._spent_s = spent_s
        if isinstance(trial, CostTrial):
            self._costs += 1
            if not self._terminal:
                self.note(f"{self._used()}: {self._text(trial)}: {self._cost(result)}")
            return
        if isinstance(result, LoadResult):
            point = Point(trial.plan, trial.load, result.rate_per_s, result.latency_ns, result.memory_bytes)
            row = point_row(self._system, self._goal, point)[:-1]
            self._rows.append(row)
            if self._terminal:
                self._draw("choosing the next configuration ...")
            else:
                figures = f"{row[2]} req/s, p{self._goal.slo.percent:g} {row[3]} ms {row[4]}".rstrip()
                self.note(f"{self._used()}: {row[0]}, {row[1]}: {figures}")
        elif isinstance(result, Refused):
            self.note(f"{self._text(trial)}: {result.reason}")

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if not self._quiet:
            self._erase()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the table, because the result repeats it."""
        self._erase()

    def _used(self) -> str:
        """Return the used part of the budget, which a long last trial may exceed."""
        return f"{self._spent_s:.0f} of {self._goal.budget_s:g} s"

    def _cost(self, result: Result) -> str:
        if isinstance(result, Refused):
            return result.reason
        assert not isinstance(result, LoadResult)
        costs = (max(each.values(), default=0.0) for each in result.costs)
        return " + ".join(f"{ns / 1e6:.3f} ms" for ns in costs)

    def _text(self, trial: Trial) -> str:
        what = f"batch of {trial.rows}" if isinstance(trial, CostTrial) else trial.load.text()
        return f"{plan_text(self._system, trial.plan)}, {what}"

    def _draw(self, last: str) -> None:
        if self._quiet:
            return
        self._erase()
        text = columns([table_head(self._goal)[:-1], *self._rows]) if self._rows else ""
        lines = [*text.splitlines(), f"{self._used()}, {self._costs} durations of batches measured; {last}"]
        print("\n".join(lines), file=sys.stderr, flush=True)
        self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}A\x1b[J", end="", file=sys.stderr, flush=True)
            self._drawn = 0
