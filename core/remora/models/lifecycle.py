"""Desired state of the models, set by startup, clients, polls and on-demand loads.

`planner` makes a plan of what the repository or the request contains; `loads` reconciles the model with it and `table`
holds the result. Several models are loaded in parallel on a bounded pool. An ensemble is loaded after its models and
serves as long as they do: see `ensembles`.
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
    """Readiness for traffic. ``waits_for`` lists the reasons why the engine is not ready.

    ``live`` is False if only a restart of the process helps.
    """

    ready: bool
    started: bool
    draining: bool
    waits_for: tuple[str, ...]
    live: bool = True


class _Polled:
    """State of the polls: the files of each model, and its failures that are already logged."""

    def __init__(self) -> None:
        self.failures: Failures = {}
        self._files: dict[str, object] = {}

    def see(self, key: str, files: object) -> None:
        """Log the failures of a model again if its files have changed since the last poll."""
        if self._files.setdefault(key, files) != files:
            self._files[key] = files
            self.failures.pop(key, None)


class Lifecycle:
    """Lifecycle of all models of an engine. Thread-safe.

    Args:
        options: model locations and load settings.
        loader: opens one model folder.
        clock: measures load times and timeouts.

    Raises NotFoundError for a repository with an unsupported URL.
    """

    def __init__(self, options: EngineOptions, loader: ModelLoader, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._catalog = Catalog(open_repositories(options, loader.ledger), namespacing=options.model_namespacing)
        self._planner = Planner(self._catalog, loader)
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
        """True once the models of the startup have been loaded or have failed."""
        self._start: Future[None] = Future()
        self._readiness_holds: list[str] = []
        self.draining = False
        self.stopping = False
        self.table.missing = self._missing

    # -- reading ----------------------------------------------------------------------------------------------------

    def resolve(self, name: str, version: int = -1) -> ServedModel:
        """Look up a version (see `ModelTable.resolve`)."""
        return self.table.resolve(name, version)

    def borrow(self, name: str, version: int = -1) -> ServedModel:
        """Acquire a version (see `ModelTable.borrow`)."""
        return self.table.borrow(name, version)

    def state(self, name: str) -> ModelState | None:
        """Return the state of a model, or None if it was never loaded."""
        return self.table.state(name)

    def ready_models(self) -> list[ServedModel]:
        """Return all ready versions, by name and version."""
        return self.table.ready_models()

    def only_model(self) -> str:
        """Return the name of the only model that is loaded or loadable on demand, or "" for none or several.

        Raises LoadingError during startup, because more models may follow.
        """
        if not self.started and self._options.wait_for_models:
            raise LoadingError("the models are still being loaded", self._start)
        if self._on_demand is None:
            return self.table.only_model
        names = {name_of(key) for key in self._catalog.models()}
        return names.pop() if len(names) == 1 else ""

    def is_live(self) -> bool:
        """Return True unless some model needs a restart of the process."""
        return not self.table.fatal()

    def is_ready(self) -> bool:
        """Return True if the engine accepts traffic [V01]: started, not draining, and with a healthy table."""
        away = self.draining or self.stopping or self._readiness_holds or not self.is_live()
        return self.started and not away and (not self._options.strict_readiness or self.table.is_fine())

    def readiness(self) -> Readiness:
        """Return the readiness and the reasons against it."""
        reasons = [] if self.started else ["the models of the start are being loaded"]
        reasons += self._readiness_holds
        fatal = self.table.fatal()
        reasons += [fatal] if fatal else []
        reasons += ["the server is draining"] if self.draining or self.stopping else []
        reasons += self.table.troubles() if self._options.strict_readiness or not self.started else []
        return Readiness(
            self.is_ready(), self.started and not self._readiness_holds, self.draining, tuple(reasons), not fatal
        )

    def hold_readiness(self, reason: str) -> Callable[[], None]:
        """Make the engine not ready for ``reason`` until the returned function is called, once, by any thread."""
        self._readiness_holds.append(reason)
        return lambda: self._readiness_holds.remove(reason)

    def _missing(self, name: str, version: int, error: RemoraError) -> NoReturn:
        """Raise LoadingError if the request may wait for a load, else the error."""
        if self.stopping:
            raise UnavailableError(f"the server is stopping: request for model '{name}' is refused") from error
        if not self.started and self._options.wait_for_models:
            raise LoadingError(f"model '{name}' is still being loaded", self._start) from error
        if self._on_demand is not None and self._catalog.is_offered(name) and self.table.newest(name) is None:
            raise LoadingError(f"model '{name}' is being loaded", self._on_demand.want(name)) from error
        raise error

    def is_model_ready(self, name: str, version: int) -> bool:
        """Return True if a request would be served [H05]. Raises NotFoundError or UnavailableError [H09]."""
        idle = self._on_demand is not None and self.table.newest(name) is None and not self.table.failure(name)
        if idle and version < 0 and self._catalog.is_offered(name):
            return True  # its first request would load it
        return not self.table.look_up(name, version).trouble

    def wait_for(self, name: str, version: int, timeout_s: float | None = None) -> ServedModel:
        """Look up a version as `resolve` does, and block while it is being loaded.

        Raises UnavailableError after ``timeout_s``, which the option ``waiting_secs`` limits.
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
                    raise UnavailableError(f"{loading.message}: the request timed out") from None

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """Return the repository index [M08], by name and version, after a scan of the repositories."""
        self._catalog.look(forgiving=True)
        entries: list[IndexEntry] = []
        for key in self._catalog.all_keys():
            name = name_of(key)
            if self._catalog.is_ambiguous(key):
                entries.append(IndexEntry(name, "", UNAVAILABLE, _DUPLICATE))
                continue
            state = self.table.state(key)
            if state is None and not ready:  # a failed model without versions has a state and is not listed
                entries.append(IndexEntry(name))
            for number, row in sorted(state.versions.items()) if state is not None else ():
                unhealthy = row.model.trouble if row.model is not None else ""
                reason = row.reason if row.state == UNAVAILABLE else ""
                shown = (UNAVAILABLE, unhealthy) if unhealthy else (row.state, reason)
                if not ready or shown[0] == READY:
                    entries.append(IndexEntry(name, str(number), *shown))
        return entries

    # -- desired state ------------------------------------------------------------------------------------------------

    def start(self) -> dict[str, RemoraError]:
        """Load the models of the startup and return the failures by model name.

        Raises NotFoundError when a repository does not exist.
        """
        try:
            self._catalog.look()
            if self._catalog.repositories and not self._catalog.all_keys():
                self._warn_of_no_models()
            with occasion("", self._polled.failures):
                wanted, failures = self._wanted_at_start()
                failures.update(self._load_many(wanted))
                self._ensembles.request(wanted)
        except BaseException:
            resolve_future(self._start, UnavailableError("startup aborted: the models could not be loaded"))
            raise
        self.started = True
        resolve_future(self._start)
        if self._options.model_control_mode in ("poll", "ondemand") and self._options.repository_poll_secs > 0:
            threading.Thread(target=self._keep_polling, name="remora poll", daemon=True).start()
        return failures

    def _warn_of_no_models(self) -> None:
        """Log the expected repository layout, unless clients load the models."""
        if self._options.model_control_mode != "explicit":
            places = ", ".join(f"'{repository.location}'" for repository in self._catalog.repositories)
            _log.warning(
                "there are no models in %s: a repository has a folder for each model and in it one for each version, "
                "such as digits/1/model.onnx",
                places,
            )

    def _wanted_at_start(self) -> tuple[list[str], dict[str, RemoraError]]:
        """Return the models to load at startup, and the errors of those that are missing or ambiguous."""
        named = list(dict.fromkeys(self._options.load_model))
        if "*" in named and len(named) > 1:
            raise InvalidArgumentError("--load-model=* stands for all models: give it alone, or only names")
        if self._options.model_control_mode in ("none", "poll") or "*" in named:
            twice = [key for key in self._catalog.all_keys() if self._catalog.is_ambiguous(key)]
            return self._catalog.models(), {key: self._planner.unpolled(key) for key in twice}
        nowhere = [name for name in named if not self._catalog.keys_of(name)]
        keys = [key for name in named for key in self._catalog.keys_of(name)]
        return keys, {name: self._planner.unpolled(name) for name in nowhere}

    def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model and wait for completion [M09]. Raises RemoraError with Triton's texts."""
        if self._options.model_control_mode not in ("explicit", "ondemand"):
            raise UnavailableError(_NOT_ALLOWED)
        if brings_files(parameters):
            keys = [name]
        else:
            self._catalog.look(name, forgiving=True)
            keys = self._catalog.keys_of(name)
        if not keys:
            raise self._planner.unpolled(name)
        with occasion(CLIENT):
            for key in keys:
                plan = self._load_plain(key, parameters)
                if plan is not None:
                    self._ensembles.load(key, plan, {})
            self._ensembles.request(keys)

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model. Requests in flight are finished in the background [M12].

        ``unload_dependents``: also unload the models that were loaded only for this ensemble.
        """
        if self._options.model_control_mode not in ("explicit", "ondemand"):
            raise UnavailableError(_NOT_ALLOWED)
        with occasion(CLIENT):
            for key in self.table.keys_of(name) or [name]:
                for each in self._ensembles.drop(key, with_models=unload_dependents):
                    self.unload_key(each)
            self._ensembles.reconcile()

    def poll(self) -> dict[str, RemoraError]:
        """Reconcile the loaded models with the repositories [M06] and return the failures."""
        self._catalog.look(forgiving=True)
        offered = self._catalog.models()
        wanted = offered if self._on_demand is None else [key for key in offered if self.table.newest(key) is not None]
        with occasion(GONE):
            for key in self.table.known():
                if key not in offered:
                    for each in self._ensembles.drop(key):
                        self.unload_key(each)
                    self.table.forget(key)
        with occasion(CHANGE, self._polled.failures):
            failures = self._load_many([key for key in wanted if self._is_changed(key)])
            if self._on_demand is None:
                self._ensembles.request(wanted)
            self._ensembles.reconcile()
        return failures

    # -- on demand --------------------------------------------------------------------------------------------------

    def _load_one(self, key: str) -> None:
        """Load a model for a request."""
        with occasion(REQUEST):
            plan = self._load_plain(key, _NOTHING)
            if plan is not None:
                self._ensembles.load(key, plan, {})
            self._ensembles.request((key,))

    def _residents(self) -> list[Resident]:
        """Return what can be evicted: a model, or an ensemble with the models loaded only for it."""
        needed, residents = self._ensembles.required(), list[Resident]()
        for key in self.table.known():
            if key in needed or self.table.newest(key) is None:
                continue
            group = (key, *self._ensembles.exclusive_models(key))
            models = [model for each in group for model in self.table.serving(each).values()]
            if not models:  # unloaded meanwhile
                continue
            size = sum(self._loads.cost.estimate(model.file_bytes) for model in models)
            used_ms = max(max(model.loaded_ms, model.statistics.last_inference_ms) for model in models)
            busy = any(model.in_flight for model in models)
            residents.append(Resident(key, size, used_ms, busy, pinned=key in self._options.load_model))
        return residents

    def _evict(self, key: str) -> None:
        """Unload an idle model and wait until its memory is free."""
        with occasion(ROOM):
            for each in self._ensembles.drop(key, with_models=True):
                self.unload_key(each)
        self._loads.join(_EVICTION_S)

    def _keep_polling(self) -> None:
        while not self._ended.wait(self._options.repository_poll_secs):
            try:
                self.poll()
            except Exception:  # one failed poll must not stop the polling
                _log.exception("polling the repositories failed")

    def _is_changed(self, key: str) -> bool:
        served = self._loads.plan_of(key)
        try:
            files = self._catalog.only(key).fingerprint()
            self._polled.see(key, files)
            return served is None or files != served.files
        except (RemoraError, OSError):
            return True  # the load of this model will report the error

    # -- loading ----------------------------------------------------------------------------------------------------

    def _load_many(self, keys: list[str]) -> dict[str, RemoraError]:
        """Load models and ensembles in any order of dependency and return the failures."""
        ensembles: dict[str, LoadPlan] = {}
        failures = self.load_all(keys, ensembles)
        for key in sorted(ensembles):
            try:
                self._ensembles.load(key, ensembles[key], failures)
            except RemoraError as error:
                failures[key] = error
        return failures

    def load_all(self, names: list[str], ensembles: dict[str, LoadPlan]) -> dict[str, RemoraError]:
        """Load models in parallel and return the failures. Plans of ensembles are put into ``ensembles``."""
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
            context = contextvars.copy_context  # carries the calling model, if a model requested the load
            with ThreadPoolExecutor(workers, thread_name_prefix="remora load") as pool:
                for future in [pool.submit(context().run, load_one, name) for name in names]:
                    future.result()
        return failures

    def _load_plain(
        self, key: str, parameters: Mapping[str, str | bytes], *, for_others: bool = False
    ) -> LoadPlan | None:
        """Load a model, or return its plan if it is an ensemble.

        ``for_others``: no client requested this model itself, so a configuration that a client sent for it stays.
        """
        with self._loads.lock_of(key):
            served = self._loads.plan_of(key)
            if for_others and served is not None and served.sent:
                return None
            plan = self._planner.plan(key, parameters)
            if step_models(plan.config):
                return plan
            self._loads.reconcile(key, plan, None)
            self._ensembles.drop(key)  # it may have been an ensemble before
        self._ensembles.reconcile()
        return None

    def open(self, name: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Load the versions of a plan. Raises RemoraError and leaves the previous versions in service."""
        self._loads.reconcile(name, plan, steps)

    def unload_key(self, name: str) -> None:
        """Unload all versions of a model."""
        self._loads.unload(name)

    # -- interface for ensembles: see ``ensembles.Table`` --------------------------------------------------------------

    def configs(self, name: str) -> dict[int, ModelConfig]:
        """Return the complete configurations of a model's ready versions."""
        return {number: model.config for number, model in self.table.serving(name).items()}

    def newest(self, name: str) -> ServedModel | None:
        """Return the newest ready version of a model."""
        return self.table.newest(name)

    def failure(self, name: str) -> str:
        """Return the error of a model's last load, or "" if it succeeded."""
        return self.table.failure(name)

    def near(self, name: str, ensemble: str) -> str:
        """Return the key of the model that an ensemble refers to by a name (see `Catalog.near`)."""
        return self._catalog.near(name, ensemble)

    # -- shutdown ------------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> bool:
        """Finish requests in flight and close all models. Return False on timeout."""
        self.stopping = True
        self._ended.set()
        self._loads.end()
        error = UnavailableError("the server is stopping, and the model is not loaded yet")
        resolve_future(self._start, error)
        if self._on_demand is not None:
            self._on_demand.stop(error)
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        done = True
        for model in self.table.clear():
            remaining_s = max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0)
            done = model.close(remaining_s) and done
        return self._loads.join(max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0)) and done


def _machine_memory() -> Space:
    return Space(memory_limit_bytes(), memory_in_use_bytes())


FAILURE_HOLDS_NS = 5_000_000_000


class _Load(NamedTuple):
    done: Future[None]
    begin_ns: int


class OnDemand:
    """Loads that requests start, one per model at a time. Thread-safe.

    Args:
        load: loads a model and returns when it serves; raises RemoraError.
        clock: measures how long a failure is remembered.
    """

    def __init__(self, load: Callable[[str], None], clock: Clock) -> None:
        self._load = load
        self._now = clock.monotonic_ns
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}

    def want(self, key: str) -> Future[None]:
        """Return the running or just failed load of a model, or start one in a separate thread."""
        with self._lock:
            load = self._loads.get(key)
            if load is not None and (not load.done.done() or self._has_just_failed(load)):
                return load.done
            load = self._loads[key] = _Load(Future(), self._now())
        threading.Thread(target=self._run, args=(key, load.done), name=f"remora load {key}", daemon=True).start()
        return load.done

    def _has_just_failed(self, load: _Load) -> bool:
        failed = load.done.exception() is not None
        return failed and self._now() - load.begin_ns < FAILURE_HOLDS_NS

    def _run(self, key: str, done: Future[None]) -> None:
        try:
            self._load(key)
        except RemoraError as error:
            resolve_future(done, error)
        except Exception as error:
            _log.exception("loading '%s' failed", key)
            resolve_future(done, InternalError(f"{type(error).__name__}: {error}"))
        else:
            resolve_future(done)

    def stop(self, error: RemoraError) -> None:
        """Fail all loads in progress with ``error`` for the requests that wait for them."""
        with self._lock:
            loads = list(self._loads.values())
        for load in loads:
            resolve_future(load.done, error)


def resolve_future(ready: Future[None], error: RemoraError | None = None) -> None:
    """Complete a load's future, unless it is done already because a stop does not wait for loads."""
    with suppress(InvalidStateError):
        if error is None:
            ready.set_result(None)
        else:
            ready.set_exception(error)
