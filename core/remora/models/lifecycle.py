"""Which models are wished to serve: by the start, by a client's load or unload, by a look at the repositories.

A wish is a plan that `planning` makes of what the repository or the request has now; `model_loads` makes it so and
`model_table` holds what came of it. Wishes for several models are followed side by side on a bounded pool.

An ensemble is loaded after the models that it is composed of, and serves as long as they do: see `ensemble_loading`.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, NoReturn

from remora.calls import IndexEntry
from remora.errors import InternalError, InvalidArgumentError, RemoraError, UnavailableError
from remora.models.ensembles import EnsembleLoader, step_models
from remora.models.load_log import CHANGE, CLIENT, GONE, REQUEST, ROOM, Failures, occasion
from remora.models.loader import LoadPlan, ModelLoader
from remora.models.loads import ModelLoads
from remora.models.memory import MemoryGate, Resident, Space
from remora.models.planner import Planner, brings_files, open_repositories
from remora.models.served_model import ServedModel, Steps
from remora.models.table import READY, UNAVAILABLE, LoadingError, ModelState, ModelTable
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository.catalog import Catalog, name_of
from remora.system.clock import Clock
from remora.system.cpus import memory_in_use_bytes, memory_limit_bytes

_log = logging.getLogger("remora.models")

_NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
_DUPLICATE = "model appears in two or more repositories"
_UNLIMITED = Space(None, 0)
_EVICTION_S = 30.0
_NOTHING: Mapping[str, str | bytes] = {}


class Readiness(NamedTuple):
    """Whether traffic may come; ``waits_for`` tells in words what it is that the engine waits for.

    ``live`` is False when only a restart of the process helps.
    """

    ready: bool
    started: bool
    draining: bool
    waits_for: tuple[str, ...]
    live: bool = True


class _Polled:
    """What polls have found: the files of each model, and the failures that are in the log for them."""

    def __init__(self) -> None:
        self.failures: Failures = {}
        self._files: dict[str, object] = {}

    def see(self, key: str, files: object) -> None:
        """Log failures of a model again if its files have changed since the last poll."""
        if self._files.setdefault(key, files) != files:
            self._files[key] = files
            self.failures.pop(key, None)


class Lifecycle:
    """Writes wishes.

    Args:
        options: where models lie and how they are loaded.
        loader: opens one model folder.
        clock: for load times.

    Raises NotFoundError for a repository whose URL nothing understands.
    """

    def __init__(self, options: EngineOptions, loader: ModelLoader, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._offers = Catalog(open_repositories(options, loader.ledger), namespacing=options.model_namespacing)
        self._planner = Planner(self._offers, loader)
        self.table = ModelTable(namespacing=options.model_namespacing)
        self._on_demand = OnDemand(self._load_one, clock) if options.model_control_mode == "ondemand" else None
        gate = MemoryGate(
            _machine_memory if options.memory_gate else lambda: _UNLIMITED,
            options.model_memory_budget or None,
            self._residents,
            self._evict if self._on_demand is not None else None,
        )
        self._loads = ModelLoads(self.table, loader, clock, retries=options.model_load_retry_count, gate=gate)
        self._ensembles = EnsembleLoader(self)
        self._polled = _Polled()
        self._ended = threading.Event()
        self.started = False
        """Whether the models that were wished for at start have been loaded, or have failed."""
        self._start: Future[None] = Future()
        self._held: list[str] = []
        self.draining = False
        self.stopping = False
        self.table.missing = self._missing

    # -- reading ----------------------------------------------------------------------------------------------------

    def resolve(self, name: str, version: int = -1) -> ServedModel:
        """See `ModelTable.resolve`."""
        return self.table.resolve(name, version)

    def borrow(self, name: str, version: int = -1) -> ServedModel:
        """See `ModelTable.borrow`."""
        return self.table.borrow(name, version)

    def state(self, name: str) -> ModelState | None:
        """What is known of a model; None for one that was never loaded."""
        return self.table.state(name)

    def ready_models(self) -> list[ServedModel]:
        """All versions that serve, by name and version."""
        return self.table.ready_models()

    def only_model(self) -> str:
        """The one model that serves, or that a request would load; "" when there is none, or when there are several.

        Raises LoadingError while it is not known: others may come with the start.
        """
        if not self.started and self._options.wait_for_models:
            raise LoadingError("the models are still being loaded", self._start)
        if self._on_demand is None:
            return self.table.only_model
        names = {name_of(key) for key in self._offers.models()}
        return names.pop() if len(names) == 1 else ""

    def is_live(self) -> bool:
        """True unless the process must be restarted before some model can serve again."""
        return not self.table.fatal()

    def is_ready(self) -> bool:
        """Whether traffic may come [V01]: not before the start, nor in a drain; else it depends on the table."""
        away = self.draining or self.stopping or self._held or not self.is_live()
        return self.started and not away and (not self._options.strict_readiness or self.table.is_fine())

    def readiness(self) -> Readiness:
        """Whether traffic may come, and why not."""
        reasons = [] if self.started else ["the models of the start are being loaded"]
        reasons += self._held
        fatal = self.table.fatal()
        reasons += [fatal] if fatal else []
        reasons += ["the server is draining"] if self.draining or self.stopping else []
        reasons += self.table.troubles() if self._options.strict_readiness or not self.started else []
        return Readiness(self.is_ready(), self.started and not self._held, self.draining, tuple(reasons), not fatal)

    def hold_readiness(self, reason: str) -> Callable[[], None]:
        """Be not ready for ``reason`` until what this returns is called, by any thread, once."""
        self._held.append(reason)
        return lambda: self._held.remove(reason)

    def _missing(self, name: str, version: int, error: RemoraError) -> NoReturn:
        """Nothing serves a request: it may wait for the start, else it has failed."""
        if self.stopping:
            raise UnavailableError(f"the server is stopping: request for model '{name}' is not taken") from error
        if not self.started and self._options.wait_for_models:
            raise LoadingError(f"model '{name}' is still being loaded", self._start) from error
        if self._on_demand is not None and self._offers.is_offered(name) and self.table.newest(name) is None:
            raise LoadingError(f"model '{name}' is being loaded", self._on_demand.want(name)) from error
        raise error

    def is_model_ready(self, name: str, version: int) -> bool:
        """Whether a request would be served [H05]. Raises NotFoundError or UnavailableError [H09]."""
        idle = self._on_demand is not None and self.table.newest(name) is None and not self.table.failure(name)
        if idle and version < 0 and self._offers.is_offered(name):
            return True  # its first request would load it
        return not self.table.look_up(name, version).trouble

    def wait_for(self, name: str, version: int, timeout_s: float | None = None) -> ServedModel:
        """As `resolve`, and blocks while what would serve is being loaded and may be waited for.

        Raises UnavailableError when ``timeout_s``, at most the option ``waiting_secs``, is over.
        """
        limit_s = self._options.waiting_secs if timeout_s is None else min(timeout_s, self._options.waiting_secs)
        end_ns = self._clock.monotonic_ns() + int(limit_s * 1e9)
        while True:
            try:
                return self.resolve(name, version)
            except LoadingError as loading:
                try:
                    loading.ready.result(max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0))
                except TimeoutError:
                    raise UnavailableError(f"{loading.message}: the request could wait no longer") from None

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """The repository index [M08] of what the repositories have now, by name and version."""
        self._offers.look(forgiving=True)
        entries: list[IndexEntry] = []
        for key in self._offers.all_keys():
            name = name_of(key)
            if self._offers.is_ambiguous(key):
                entries.append(IndexEntry(name, "", UNAVAILABLE, _DUPLICATE))
                continue
            state = self.table.state(key)
            if state is None and not ready:  # one without versions, whose load has failed, is not listed at all
                entries.append(IndexEntry(name))
            for number, row in sorted(state.versions.items()) if state is not None else ():
                trouble = row.model.trouble if row.model is not None else ""
                reason = row.reason if row.state == UNAVAILABLE else ""
                standing = (UNAVAILABLE, trouble) if trouble else (row.state, reason)
                if not ready or standing[0] == READY:
                    entries.append(IndexEntry(name, str(number), *standing))
        return entries

    # -- wishes -----------------------------------------------------------------------------------------------------

    def start(self) -> dict[str, RemoraError]:
        """Load what is to be loaded at start; returns what could not be, by model name.

        Raises NotFoundError when a repository is not there.
        """
        try:
            self._offers.look()
            if self._offers.repositories and not self._offers.all_keys():
                self._warn_of_no_models()
            with occasion("", self._polled.failures):
                wanted, failures = self._wanted_at_start()
                failures.update(self._bring(wanted))
                self._ensembles.wish(wanted)
        except BaseException:
            settle(self._start, UnavailableError("the models could not be loaded: the server ends"))
            raise
        self.started = True
        settle(self._start)
        if self._options.model_control_mode in ("poll", "ondemand") and self._options.repository_poll_secs > 0:
            threading.Thread(target=self._keep_polling, name="remora poll", daemon=True).start()
        return failures

    def _warn_of_no_models(self) -> None:
        """Say what a repository looks like, unless clients are to bring models."""
        if self._options.model_control_mode != "explicit":
            places = ", ".join(f"'{repository.location}'" for repository in self._offers.repositories)
            _log.warning(
                "there are no models in %s: a repository has a folder for each model and in it one for each version, "
                "such as digits/1/model.onnx",
                places,
            )

    def _wanted_at_start(self) -> tuple[list[str], dict[str, RemoraError]]:
        """The models to load at start, and those that cannot be for having no one place."""
        named = list(dict.fromkeys(self._options.load_model))
        if "*" in named and len(named) > 1:
            raise InvalidArgumentError("--load-model=* stands for all models: give it alone, or only names")
        if self._options.model_control_mode in ("none", "poll") or "*" in named:
            twice = [key for key in self._offers.all_keys() if self._offers.is_ambiguous(key)]
            return self._offers.models(), {key: self._planner.unpolled(key) for key in twice}
        nowhere = [name for name in named if not self._offers.keys_of(name)]
        keys = [key for name in named for key in self._offers.keys_of(name)]
        return keys, {name: self._planner.unpolled(name) for name in nowhere}

    def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model and wait until it is done [M09]. Raises RemoraError with Triton's texts."""
        if self._options.model_control_mode not in ("explicit", "ondemand"):
            raise UnavailableError(_NOT_ALLOWED)
        if brings_files(parameters):
            keys = [name]
        else:
            self._offers.look(name, forgiving=True)
            keys = self._offers.keys_of(name)
        if not keys:
            raise self._planner.unpolled(name)
        with occasion(CLIENT):
            for key in keys:
                plan = self._load_plain(key, parameters)
                if plan is not None:
                    self._ensembles.load(key, plan, {})
            self._ensembles.wish(keys)

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Take a model out of service; what runs is finished in the background [M12].

        ``unload_dependents``: with the models that were loaded for this ensemble alone.
        """
        if self._options.model_control_mode not in ("explicit", "ondemand"):
            raise UnavailableError(_NOT_ALLOWED)
        with occasion(CLIENT):
            for key in self.table.keys_of(name) or [name]:
                for each in self._ensembles.drop(key, with_models=unload_dependents):
                    self.take_out(each)
            self._ensembles.settle()

    def poll(self) -> dict[str, RemoraError]:
        """Make what serves follow what the repositories have now [M06]; returns what could not be loaded."""
        self._offers.look(forgiving=True)
        offered = self._offers.models()
        wanted = offered if self._on_demand is None else [key for key in offered if self.table.newest(key) is not None]
        with occasion(GONE):
            for key in self.table.known():
                if key not in offered:
                    for each in self._ensembles.drop(key):
                        self.take_out(each)
                    self.table.forget(key)
        with occasion(CHANGE, self._polled.failures):
            failures = self._bring([key for key in wanted if self._is_changed(key)])
            if self._on_demand is None:
                self._ensembles.wish(wanted)
            self._ensembles.settle()
        return failures

    # -- on demand --------------------------------------------------------------------------------------------------

    def _load_one(self, key: str) -> None:
        """Load a model because a request came for it."""
        with occasion(REQUEST):
            plan = self._load_plain(key, _NOTHING)
            if plan is not None:
                self._ensembles.load(key, plan, {})
            self._ensembles.wish((key,))

    def _residents(self) -> list[Resident]:
        """What can go to make room: a model, or an ensemble with what was loaded for it alone."""
        needed, found = self._ensembles.needed(), list[Resident]()
        for key in self.table.known():
            if key in needed or self.table.newest(key) is None:
                continue
            group = (key, *self._ensembles.company(key))
            models = [model for each in group for model in self.table.serving(each).values()]
            if not models:  # it has gone since
                continue
            size = sum(self._loads.cost.estimate(model.file_bytes) for model in models)
            used_ms = max(max(model.loaded_ms, model.statistics.last_inference_ms) for model in models)
            busy = any(model.in_flight for model in models)
            found.append(Resident(key, size, used_ms, busy, pinned=key in self._options.load_model))
        return found

    def _evict(self, key: str) -> None:
        """Let go of an idle model; returns when its memory is free."""
        with occasion(ROOM):
            for each in self._ensembles.drop(key, with_models=True):
                self.take_out(each)
        self._loads.join(_EVICTION_S)

    def _keep_polling(self) -> None:
        while not self._ended.wait(self._options.repository_poll_secs):
            try:
                self.poll()
            except Exception:  # one bad look must not end all others
                _log.exception("polling the repositories failed")

    def _is_changed(self, key: str) -> bool:
        served = self._loads.plan_of(key)
        try:
            files = self._offers.only(key).fingerprint()
            self._polled.see(key, files)
            return served is None or files != served.files
        except (RemoraError, OSError):
            return True  # the others go on, and its load will say why

    # -- loading ----------------------------------------------------------------------------------------------------

    def _bring(self, keys: list[str]) -> dict[str, RemoraError]:
        """Load models and ensembles, whatever depends on what; returns what could not be."""
        ensembles: dict[str, LoadPlan] = {}
        failures = self.load_all(keys, ensembles)
        for key in sorted(ensembles):
            try:
                self._ensembles.load(key, ensembles[key], failures)
            except RemoraError as error:
                failures[key] = error
        return failures

    def load_all(self, names: list[str], ensembles: dict[str, LoadPlan]) -> dict[str, RemoraError]:
        """Load models side by side; what could not be. Ensembles are only planned, and put into ``ensembles``."""
        failures: dict[str, RemoraError] = {}

        def load_one(name: str) -> None:
            try:
                plan = self._load_plain(name, _NOTHING, for_others=True)
                if plan is not None:
                    ensembles[name] = plan
            except RemoraError as error:
                failures[name] = error

        if len(names) == 1:
            load_one(names[0])  # no thread for the most common case
        elif names:
            workers = max(1, min(self._options.model_load_thread_count, len(names)))
            context = contextvars.copy_context  # whose call asks for the load, if a model's does
            with ThreadPoolExecutor(workers, thread_name_prefix="remora load") as pool:
                for future in [pool.submit(context().run, load_one, name) for name in names]:
                    future.result()
        return failures

    def _load_plain(
        self, key: str, parameters: Mapping[str, str | bytes], *, for_others: bool = False
    ) -> LoadPlan | None:
        """Load a model, unless it is an ensemble: then its plan.

        ``for_others``: nobody asked for this model itself, so a configuration that a client sent for it holds.
        """
        with self._loads.lock_of(key):
            served = self._loads.plan_of(key)
            if for_others and served is not None and served.sent:
                return None
            plan = self._planner.plan(key, parameters)
            if step_models(plan.config):
                return plan
            self._loads.obey(key, plan, None)
            self._ensembles.drop(key)  # which it may have been before
        self._ensembles.settle()
        return None

    def open(self, name: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Let the versions of a plan serve. Raises RemoraError; then what served before goes on."""
        self._loads.obey(name, plan, steps)

    def take_out(self, name: str) -> None:
        """End the service of a model, whatever serves of it."""
        self._loads.take_out(name)

    # -- what ensembles ask of it: see ``ensemble_loading.Table`` ----------------------------------------------------

    def configs(self, name: str) -> dict[int, ModelConfig]:
        """The complete configurations of a model's ready versions."""
        return {number: model.config for number, model in self.table.serving(name).items()}

    def newest(self, name: str) -> ServedModel | None:
        """What serves of a model."""
        return self.table.newest(name)

    def failure(self, name: str) -> str:
        """What a model's last load failed with; "" when it did not."""
        return self.table.failure(name)

    def near(self, name: str, ensemble: str) -> str:
        """The key of the model that an ensemble means by a name; see `Catalog.near`."""
        return self._offers.near(name, ensemble)

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> bool:
        """Finish what is under way in all models, then close them. False when the time was not enough."""
        self.stopping = True
        self._ended.set()
        self._loads.end()
        error = UnavailableError("the server is stopping, and the model was not there yet")
        settle(self._start, error)
        if self._on_demand is not None:
            self._on_demand.stop(error)
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        done = True
        for model in self.table.clear():
            left_s = max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0)
            done = model.close(left_s) and done
        return self._loads.join(max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0)) and done


def _machine_memory() -> Space:
    return Space(memory_limit_bytes(), memory_in_use_bytes())


FAILURE_HOLDS_NS = 5_000_000_000


class _Flight(NamedTuple):
    done: Future[None]
    begin_ns: int


class OnDemand:
    """Thread-safe.

    Args:
        load: loads a model and returns when it serves; raises RemoraError.
        clock: for how long failures hold.
    """

    def __init__(self, load: Callable[[str], None], clock: Clock) -> None:
        self._load = load
        self._now = clock.monotonic_ns
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}

    def want(self, key: str) -> Future[None]:
        """The load of a model: one that goes on, one that has just failed, or a new one in a thread of its own."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None and (not flight.done.done() or self._holds(flight)):
                return flight.done
            flight = self._flights[key] = _Flight(Future(), self._now())
        threading.Thread(target=self._fly, args=(key, flight.done), name=f"remora load {key}", daemon=True).start()
        return flight.done

    def _holds(self, flight: _Flight) -> bool:
        failed = flight.done.exception() is not None
        return failed and self._now() - flight.begin_ns < FAILURE_HOLDS_NS

    def _fly(self, key: str, done: Future[None]) -> None:
        try:
            self._load(key)
        except RemoraError as error:
            settle(done, error)
        except Exception as error:
            _log.exception("loading '%s' failed", key)
            settle(done, InternalError(f"{type(error).__name__}: {error}"))
        else:
            settle(done)

    def stop(self, error: RemoraError) -> None:
        """Nobody waits any longer: whoever does is told of ``error``."""
        with self._lock:
            flights = list(self._flights.values())
        for flight in flights:
            settle(flight.done, error)


def settle(ready: Future[None], error: RemoraError | None = None) -> None:
    """End the wait for a load, well or with an error, unless it has ended already: a stop does not wait for loads."""
    with suppress(InvalidStateError):
        if error is None:
            ready.set_result(None)
        else:
            ready.set_exception(error)
