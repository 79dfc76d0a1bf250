"""Trials of `remora tune`: loads on the engine in this process.

Requests pass through one event loop as in the server, which runs all the time, because it reads the answers of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from remora import calls
from remora.api.http import LoopMailbox
from remora.api.models import function_arguments, step_models
from remora.api.system import run_in_daemon, usable_cpus, usage_with_children
from remora.config import to_dict
from remora.errors import InvalidArgumentError, NotFoundError, RemoraError
from remora.in_process import as_form
from remora.messages import Data, InferForm, InputSpec, Outcome, Ticket
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.clock import SystemClock
from remora_tools.client.infer import make_request
from remora_tools.deciders.arrivals import POISSON, arrivals
from remora_tools.deciders.latencies import Histogram, merge
from remora_tools.deciders.stability import WINDOWS, Window, is_stable
from remora_tools.load.requests import with_rows
from remora_tools.tuning import (
    CostResult,
    CostTrial,
    Load,
    LoadResult,
    LoadTrial,
    ModelSpace,
    Plan,
    Refused,
    Result,
    Settings,
    System,
    Trial,
)
from remora_tools.tuning.candidates import batch_sizes, slots_of
from remora_tools.tuning.configuring import THREADS, has_fixed_instances, providers_of, read_settings, with_settings

if TYPE_CHECKING:
    from remora.engine import Engine
    from remora.models.served_model import ServedModel

_LARGEST_BATCH = 128
_COST_S = 0.05
_COST_ROUNDS = 3
_LEAST_ANSWERS = 200
"""Answers of a measurement at least, so that a p99 has a meaning."""
_MOST_WINDOWS = 9
_MOST_FAILURES = 20
_AFTER_FAILURE_S = 0.001
_MOST_IN_FLIGHT = 20_000
_ARRIVALS_A_TURN = 1024
"""Requests that arrive in one turn of the loop, so that a rate beyond its power leaves time for answers and the end."""
_FIRST_ANSWER_S = 60.0
_DRAIN_S = 30.0
_LONGEST = 5
"""A measurement takes at most so many times the time of its windows, however few answers there are."""

Totals = Mapping[int, tuple[int, int]]
"""Nanoseconds and number of batches by rows, since a model was loaded."""


class Target(NamedTuple):
    """A model that gets requests from outside, and the request to it."""

    name: str
    form: InferForm
    data: Sequence[Data]


@contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in another thread. Leave it after the engine, whose workers it reads.

    KeyboardInterrupt leaves the loop's work behind. Raises OSError if the loop cannot begin.
    """
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        end = asyncio.Event()
        running.set_result((asyncio.get_running_loop(), end))
        await end.wait()

    def work() -> None:
        with asyncio.Runner() as runner:
            runner.run(run())

    ended = run_in_daemon(work, "remora tune")
    either: list[Future[Any]] = [running, ended]
    wait(either, return_when=FIRST_COMPLETED)
    if not running.done():
        ended.result()
    loop, end = running.result()
    interrupted = False
    try:
        yield loop
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        loop.call_soon_threadsafe(end.set)
        if not interrupted:  # because a measurement in progress waits up to _DRAIN_S for its requests
            ended.result()


class TrialEngine:
    """Engine whose models are tuned. For one thread at a time.

    Args:
        engine: started, in explicit mode.
        loop: sends the requests; runs in another thread until the engine has stopped.
        options: of the command, for the request: json, npy, input, random, shape, output, classes, batch.
        cores: processors of the machine.

    Raises InvalidArgumentError for models that cannot be tuned.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, options: argparse.Namespace, cores: int = 0
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._cores = cores or usable_cpus()
        ready = {model.name: model for model in engine.models()}
        if not ready:
            raise NotFoundError("no model is ready to be tuned")
        inner = {name for model in ready.values() for name in step_models(model.config)}
        routes = {name: _route(name, ready) for name in ready if name not in inner}
        names = list(dict.fromkeys(name for route in routes.values() for name in route))
        for name in (*routes, *names):
            _refuse_untunable(ready[name])
        self.configs: dict[str, ModelConfig] = {name: _copy(ready[name].config) for name in names}
        self._targets = [_target(ready[name], options) for name in routes]
        self._larger: dict[int, list[Target]] = {}
        limits = [
            ready[name].signature.max_batch_size if ready[name].steps is not None else _most_rows(ready[name].config)
            for name in routes
        ]
        self.system = System(
            tuple(self._space(name) for name in names),
            tuple(tuple(names.index(name) for name in route) for route in routes.values()),
            self._cores,
            max(_rows(ready[target.name], target) for target in self._targets),
            max(min(limits), 1),
        )
        self._loaded: list[Settings] = list(self.system.present)
        gc.collect()

    def _space(self, name: str) -> ModelSpace:
        config = self.configs[name]
        present = read_settings(config, self._cores)
        batches = batch_sizes(_most_rows(config)) if config.max_batch_size > 1 else ()
        if has_fixed_instances(config):
            return ModelSpace(name, present, batches, ((present.instances, present.runtime),))
        providers = providers_of(config, _onnx_providers(config))
        return ModelSpace(name, present, batches, slots_of(present, self._cores, config.backend in THREADS, providers))

    # -- trials -------------------------------------------------------------------------------------------------------

    def run(self, trial: Trial) -> Result:
        """Carry out a trial. A plan that cannot load or answer is `Refused`."""
        begin_ns = SystemClock.monotonic_ns()

        def spent_s() -> float:
            return (SystemClock.monotonic_ns() - begin_ns) / 1e9

        try:
            self._load(trial.plan)
            if isinstance(trial, CostTrial):
                return self._measure_cost(trial.rows)._replace(spent_s=spent_s())
            return self._measure_load(trial)._replace(spent_s=spent_s())
        except RemoraError as error:
            return Refused(" ".join(str(error).split()), spent_s())

    def _load(self, plan: Plan) -> None:
        """Load the models whose settings differ from the loaded ones. Raises RemoraError."""
        for place, (space, new) in enumerate(zip(self.system.models, plan, strict=True)):
            if new == self._loaded[place]:
                continue
            complete = self.configs[space.name]
            config = with_settings(complete, new, space.present, complete, self._cores)
            self._loaded[place] = Settings(limit=-1)  # unknown if the load fails
            self._engine.load(space.name, json.dumps(to_dict(config)))
            self._loaded[place] = new
        gc.collect()

    def _measure_cost(self, rows: int) -> CostResult:
        if rows not in self._larger:
            self._larger[rows] = [_with_rows(target, rows // self.system.rows) for target in self._targets]
        found: list[list[Mapping[int, float]]] = []
        latencies: list[float] = []
        busy: list[float] = []
        usage, begin_ns = usage_with_children(), SystemClock.monotonic_ns()
        for _ in range(_COST_ROUNDS):
            before = [self._totals(space.name) for space in self.system.models]
            for target in self._larger[rows]:
                drive = _Drive(self._engine, [target], Load(1))
                self._finish(drive.run(warm_s=0.0, window_s=_COST_S, least=2, most_windows=1))
            latencies.append(drive.latency(0).percentile(50))
            busy.append(drive.busy_s * 1e9 / max(drive.answers, 1))
            names = [space.name for space in self.system.models]
            found.append([_durations(old, self._totals(name)) for old, name in zip(before, names, strict=True)])
        after, wall_s = usage_with_children(), (SystemClock.monotonic_ns() - begin_ns) / 1e9
        costs = [_medians(several) for several in zip(*found, strict=True)]
        inside = sum(max(costs[model].values(), default=0.0) for model in self.system.routes[-1])
        # The loop's share is less than the rest of the latency if threads wake, more if it runs the model itself.
        front_ns = min(max(median(latencies) - inside, 0.0), median(busy)) if rows == self.system.rows else 0.0
        cores = (after.cpu_s - usage.cpu_s) / wall_s
        return CostResult(costs, cores, front_ns, after.resident_bytes, wall_s)

    def _measure_load(self, trial: LoadTrial) -> LoadResult:
        drive = _Drive(self._engine, self._targets, trial.load)
        window_s = trial.seconds / WINDOWS
        begin_ns = SystemClock.monotonic_ns()
        self._finish(drive.run(window_s, window_s, least=_LEAST_ANSWERS, most_windows=_MOST_WINDOWS))
        wall_s = (SystemClock.monotonic_ns() - begin_ns) / 1e9
        return LoadResult(
            drive.rate_per_s,
            max(drive.latency(target).percentile(trial.percent) for target in range(len(self._targets))),
            usage_with_children().resident_bytes,
            wall_s,
            drive.failures,
            drive.busy_s / wall_s,
        )

    def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the loop to its end."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _totals(self, name: str) -> Totals:
        (stats,) = self._engine.perform(calls.ModelStatistics(name))[-1:]
        return {
            batch.batch_size: (
                batch.compute_input.ns + batch.compute_infer.ns + batch.compute_output.ns,
                batch.compute_infer.count,
            )
            for batch in stats.batches
        }


def _durations(before: Totals, after: Totals) -> dict[int, float]:
    """Return the mean duration of a batch by rows between two readings."""
    found = {}
    for rows, (ns, count) in after.items():
        old_ns, old_count = before.get(rows, (0, 0))
        if count > old_count:
            found[rows] = (ns - old_ns) / (count - old_count)
    return found


def _medians(several: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the median duration by rows."""
    sizes = dict.fromkeys(rows for each in several for rows in each)
    return {rows: median(each[rows] for each in several if rows in each) for rows in sizes}


# -- the models -------------------------------------------------------------------------------------------------------


def _route(name: str, ready: Mapping[str, ServedModel]) -> list[str]:
    """Return the models that a request visits, in the order of the steps."""
    steps = [step.model_name for step in ready[name].config.ensemble_scheduling.step]
    return [inner for step in steps for inner in _route(step, ready)] if steps else [name]


def _refuse_untunable(model: ServedModel) -> None:
    if model.config.HasField("sequence_batching"):
        raise InvalidArgumentError(
            f"model '{model.name}' keeps sequences: its batches are made of its open sequences and not of its load. "
            "Measure candidates with `remora bench load --sequence N`, or tune the other models with --model"
        )
    if model.generation is not None:
        raise InvalidArgumentError(
            f"model '{model.name}' is a language model, which schedules its own steps: `remora explain` shows what to "
            "change"
        )
    if model.decoupled:
        raise InvalidArgumentError(
            f"model '{model.name}' is decoupled: how long a request takes is up to its stream. Measure candidates with "
            "`remora bench load`, or tune the other models with --model"
        )


def _copy(config: ModelConfig) -> ModelConfig:
    copy = ModelConfig()
    copy.CopyFrom(config)
    return copy


def _most_rows(config: ModelConfig) -> int:
    return max(config.max_batch_size, _LARGEST_BATCH) if config.max_batch_size > 1 else 1


def _onnx_providers(config: ModelConfig) -> Sequence[str]:
    if config.backend != "onnxruntime":
        return ()
    import onnxruntime

    return tuple(onnxruntime.get_available_providers())


def _target(model: ServedModel, options: argparse.Namespace) -> Target:
    """Return the request to a model. Raises RemoraError, UsageError, OSError."""
    given = options.json or options.npy or options.input
    request = make_request(
        model.metadata([model.version_text]),
        argparse.Namespace(**{**vars(options), "random": options.random or not given}),
        function_arguments(model.config),
    )
    if options.batch:
        request = with_rows(request, options.batch)
    specs = tuple(InputSpec(each.name, each.datatype, each.data.shape) for each in request.inputs)
    form = as_form(specs, request.outputs, "", request.parameters)
    return Target(model.name, form, [each.data for each in request.inputs])


def _rows(model: ServedModel, target: Target) -> int:
    return int(target.form.inputs[0].shape[0]) if model.signature.max_batch_size > 0 and target.form.inputs else 1


def _with_rows(target: Target, times: int) -> Target:
    """Return the target with a request of so many times the rows."""
    if times <= 1:
        return target
    import numpy as np

    data = [np.repeat(np.asarray(each), times, axis=0) for each in target.data]
    specs = tuple(
        InputSpec(spec.name, spec.datatype, array.shape) for spec, array in zip(target.form.inputs, data, strict=True)
    )
    return Target(
        target.name, as_form(specs, [row.name for row in target.form.outputs], "", target.form.parameters), data
    )


# -- loads ------------------------------------------------------------------------------------------------------------


class _Sent:
    """A request that was sent to a target."""

    __slots__ = ("answered", "begin_ns", "target")

    def __init__(self, target: int, begin_ns: int) -> None:
        self.target = target
        self.begin_ns = begin_ns
        self.answered = False


class _Drive:
    """One load in the event loop of this thread.

    The requests go to the targets in turn. Latency counts from the scheduled time in an open loop.
    """

    def __init__(self, engine: Engine, targets: Sequence[Target], load: Load) -> None:
        self._engine = engine
        self._targets = targets
        self._load = load
        self._served = [engine.resolve(target.name) for target in targets]
        self._histograms = [Histogram() for _ in targets]
        self._windows: list[tuple[Window, list[Histogram]]] = []
        self._count = 0
        self._in_flight = 0
        self._waiting: set[Ticket] = set()
        self._sending = True
        self._turn = 0
        self._error: RemoraError | None = None
        self._seconds = 0.0
        self.failures = 0
        self.busy_s = 0.0
        """Processor time of the loop."""

    async def run(self, warm_s: float, window_s: float, *, least: int, most_windows: int) -> None:
        """Measure until three windows are stable and ``least`` requests are answered.

        Raises RemoraError if requests fail from the start.
        """
        begin_s = time.thread_time()
        loop = asyncio.get_running_loop()
        self._mailbox = LoopMailbox(loop)
        self._drained = asyncio.Event()
        if self._load.rate_per_s:
            self._schedule = arrivals(self._load.rate_per_s, POISSON)
            self._begin_s = loop.time()
            self._arrive(next(self._schedule))
        for _ in range(self._load.connections):
            loop.call_soon(self._send)
        try:
            if warm_s:
                await asyncio.sleep(warm_s)
            await self._measure(window_s, least, most_windows)
        finally:
            self._sending = False
            for ticket in tuple(self._waiting):
                ticket.cancel()  # those in the queue are answered at once
            if self._in_flight:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._drained.wait(), _DRAIN_S)
            self.busy_s = time.thread_time() - begin_s

    async def _measure(self, window_s: float, least: int, most_windows: int) -> None:
        wanted = min(WINDOWS, most_windows)
        self._restart_window()
        longest_s = _LONGEST * window_s * most_windows
        waited_s = 0.0
        while True:
            begin_s = asyncio.get_running_loop().time()
            await asyncio.sleep(window_s)
            seconds = asyncio.get_running_loop().time() - begin_s
            waited_s += seconds
            if self._error is not None and self.failures >= max(_MOST_FAILURES, self._count):
                raise self._error
            if not self._count and not self._windows and waited_s < _FIRST_ANSWER_S:
                continue
            middle = max(each.percentile(50) for each in self._histograms)
            self._windows.append((Window(self._count / seconds, middle), self._histograms))
            self._seconds += seconds
            settled = most_windows < WINDOWS or is_stable([window for window, _ in self._windows])
            enough = len(self._windows) >= wanted and self.answers >= least and settled
            if enough or waited_s >= longest_s or (len(self._windows) >= most_windows and self.answers >= least):
                return
            self._restart_window()

    def _restart_window(self) -> None:
        self._histograms = [Histogram() for _ in self._targets]
        self._count = 0

    @property
    def answers(self) -> int:
        """Answers over all windows."""
        return sum(each.count for _, several in self._windows for each in several)

    @property
    def rate_per_s(self) -> float:
        """Answers per second over all windows."""
        return self.answers / self._seconds if self._seconds else 0.0

    def latency(self, target: int) -> Histogram:
        """Return the latencies of a target over all windows."""
        return merge(several[target] for _, several in self._windows)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self, due_ns: int) -> None:
        """Send a request of the open loop and wait for the next arrival."""
        loop = asyncio.get_running_loop()
        for _ in range(_ARRIVALS_A_TURN):
            if not self._sending:
                return
            due_s = self._begin_s + due_ns / 1e9
            if due_s > loop.time():
                loop.call_at(due_s, self._arrive, due_ns)
                return
            if self._in_flight < _MOST_IN_FLIGHT:
                late_ns = int((loop.time() - due_s) * 1e9)
                self._send(SystemClock.monotonic_ns() - late_ns)
            due_ns = next(self._schedule)
        loop.call_soon(self._arrive, due_ns)

    def _send(self, begin_ns: int = 0) -> None:
        if not self._sending:
            return
        place = self._turn % len(self._targets)
        self._turn += 1
        target = self._targets[place]
        self._in_flight += 1
        sent = _Sent(place, begin_ns or SystemClock.monotonic_ns())
        try:
            ticket = self._served[place].submit(
                target.form, target.data, self._reply, mailbox=self._mailbox, context=sent
            )
        except RemoraError as error:
            self._ended(error)
            return
        if not sent.answered:
            self._waiting.add(ticket)

    def _reply(self, ticket: Ticket, outcome: Outcome) -> None:
        sent = ticket.context
        assert isinstance(sent, _Sent)
        sent.answered = True
        self._waiting.discard(ticket)
        if isinstance(outcome, RemoraError):
            self._ended(outcome)
            return
        self._histograms[sent.target].record(SystemClock.monotonic_ns() - sent.begin_ns)
        self._count += 1
        self._ended(None)

    def _ended(self, error: RemoraError | None) -> None:
        self._in_flight -= 1
        if not self._sending:
            if not self._in_flight:
                self._drained.set()
            return
        if error is not None:
            self.failures += 1
            self._error = self._error or error
        if self._load.connections:
            loop = asyncio.get_running_loop()
            if error is None:
                loop.call_soon(self._send)  # as a client whose next request arrives in a later turn of the loop
            else:
                loop.call_later(_AFTER_FAILURE_S, self._send)
