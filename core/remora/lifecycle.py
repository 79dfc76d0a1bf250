"""Which model versions serve: loading, the table of what is loaded, unloading.

The table is read without a lock by every request and written under one. Loads run side by side on a bounded pool; a
load replaces a model's versions in one step, when all of them are ready (spec M04). What is replaced finishes its
requests and is closed by a thread of its own.

An ensemble is loaded after the models that it is composed of, and serves as long as they do: it goes when one of them
goes, and comes back with it.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from remora.composing import step_models
from remora.ensemble_loading import EnsembleLoader, LoadFailedError, PollFailedError
from remora.errors import NotFoundError, RemoraError, UnavailableError
from remora.loading import LoadPlan, ModelLoader, PollError
from remora.messages import IndexEntry
from remora.model import ServedModel, Steps
from remora.options import EngineOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.repository import ModelFolder, Repository, open_repository
from remora.system.clock import Clock

_log = logging.getLogger("remora.models")

READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
UNLOADED = "unloaded"
_CODE_WORDS = {
    "UNKNOWN": "Unknown",
    "INTERNAL": "Internal",
    "NOT_FOUND": "Not found",
    "INVALID_ARG": "Invalid argument",
    "UNAVAILABLE": "Unavailable",
    "UNSUPPORTED": "Unsupported",
    "ALREADY_EXISTS": "Already exists",
    "CANCELLED": "Cancelled",
}
_NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"


class VersionState(NamedTuple):
    """What is known of one version; ``model`` only while READY."""

    state: str
    reason: str = ""
    model: ServedModel | None = None


_NONE: Mapping[int, VersionState] = {}


class ModelState(NamedTuple):
    """What is known of one model. Immutable: a change puts another one into the table."""

    versions: Mapping[int, VersionState] = _NONE
    newest: ServedModel | None = None

    @staticmethod
    def of(versions: Mapping[int, VersionState]) -> ModelState:
        """The state with its highest ready version picked out (spec M03)."""
        ready = [number for number, row in versions.items() if row.model is not None]
        return ModelState(versions, versions[max(ready)].model if ready else None)

    @property
    def ready_versions(self) -> list[int]:
        """Ascending."""
        return sorted(number for number, row in self.versions.items() if row.model is not None)


_UNKNOWN = ModelState()


class Lifecycle:
    """The table of models and the threads that change it.

    Args:
        options: where models lie and how they are loaded.
        loader: opens one model folder.
        clock: for load times.
    """

    def __init__(self, options: EngineOptions, loader: ModelLoader, clock: Clock) -> None:
        self._options = options
        self._loader = loader
        self._clock = clock
        self._lock = threading.Lock()
        self._table: dict[str, ModelState] = {}
        self._repositories = open_repositories(options)
        self._folders: dict[str, list[ModelFolder]] = {}
        self._model_locks: dict[str, threading.Lock] = {}
        self._closing: list[threading.Thread] = []
        self._ensembles = EnsembleLoader(self)
        self.started = False
        self.stopping = False

    # -- reading ----------------------------------------------------------------------------------------------------

    def resolve(self, name: str, version: int = -1) -> ServedModel:
        """The version that serves; -1 for the highest ready one.

        Raises NotFoundError or UnavailableError (spec H09).
        """
        state = self._table.get(name)
        if state is None:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if version < 0:
            if state.newest is None:
                raise NotFoundError(f"Request for unknown model: '{name}' has no available versions")
            return state.newest
        row = state.versions.get(version)
        if row is None:
            raise NotFoundError(f"Request for unknown model: '{name}' version {version} is not found")
        if row.model is None:
            raise UnavailableError(f"Request for unknown model: '{name}' version {version} is not at ready state")
        return row.model

    def borrow(self, name: str, version: int = -1) -> ServedModel:
        """As `resolve`, and keeps the model from being closed until it is given back."""
        while True:
            model = self.resolve(name, version)
            if model.borrow():
                return model  # else it is being closed, and the table has said so since

    def state(self, name: str) -> ModelState | None:
        """What is known of a model; None for one that was never loaded."""
        return self._table.get(name)

    def ready_models(self) -> list[ServedModel]:
        """All versions that serve, by name and version."""
        rows = [row for _, state in sorted(self._table.items()) for _, row in sorted(state.versions.items())]
        return [row.model for row in rows if row.model is not None]

    def is_ready(self) -> bool:
        """Whether traffic may come (spec V01): a pure function of the table."""
        if not self.started or self.stopping:
            return False
        return not self._options.strict_readiness or all(_model_is_fine(state) for state in self._table.values())

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """The repository index (spec M08), by name and version."""
        entries: list[IndexEntry] = []
        names = set(self._table) if ready else set(self._table) | set(self._folders)
        for name in sorted(names):
            state = self._table.get(name)
            if state is None or not state.versions:
                if not ready:
                    entries.append(IndexEntry(name))
                continue
            for number, row in sorted(state.versions.items()):
                trouble = row.model.trouble if row.model is not None else ""
                standing = (UNAVAILABLE, trouble) if trouble else (row.state, row.reason)
                if not ready or standing[0] == READY:
                    entries.append(IndexEntry(name, str(number), *standing))
        return entries

    # -- changing ---------------------------------------------------------------------------------------------------

    def start(self) -> dict[str, RemoraError]:
        """Load what is to be loaded at start; returns what could not be, by model name.

        Raises NotFoundError when a repository is not there, and UnavailableError for a name that no repository has.
        """
        self._scan()
        wanted = self._wanted_at_start()
        ensembles: dict[str, LoadPlan] = {}
        failures = self.load_all(wanted, ensembles)
        for name in sorted(ensembles):
            try:
                if self.newest(name) is None:  # not loaded for another one yet
                    self._ensembles.load(name, ensembles[name], failures)
            except RemoraError as error:
                failures[name] = error
        self._ensembles.wish(wanted)
        self.started = True
        return failures

    def load_all(self, names: list[str], ensembles: dict[str, LoadPlan]) -> dict[str, RemoraError]:
        """Load models side by side; what could not be. Ensembles are only planned, and put into ``ensembles``."""
        failures: dict[str, RemoraError] = {}

        def load_one(name: str) -> None:
            try:
                plan = self._load_plain(name, {})
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

    def _wanted_at_start(self) -> list[str]:
        if self._options.model_control_mode == "none":
            return sorted(self._folders)
        if "*" in self._options.load_model:
            return sorted(self._folders)
        return list(dict.fromkeys(self._options.load_model))

    def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model and wait until it is done (spec M09). Raises RemoraError with Triton's texts."""
        if self._options.model_control_mode != "explicit":
            raise UnavailableError(_NOT_ALLOWED)
        plan = self._load_plain(name, parameters)
        if plan is not None:
            self._ensembles.load(name, plan, {})
        self._ensembles.wish((name,))

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Take a model out of service; what runs is finished in the background (spec M12).

        ``unload_dependents``: with the models that were loaded for this ensemble alone.
        """
        if self._options.model_control_mode != "explicit":
            raise UnavailableError(_NOT_ALLOWED)
        for each in self._ensembles.drop(name, with_models=unload_dependents):
            self.take_out(each)
        self._ensembles.settle()

    def take_out(self, name: str) -> None:
        """End the service of a model, whatever serves of it."""
        with self._lock:
            state = self._table.get(name)
            if state is None:
                return
            rows = {
                number: VersionState(UNAVAILABLE, UNLOADED) if row.model else row
                for number, row in state.versions.items()
            }
            self._table[name] = ModelState.of(rows)
        self._close(row.model for row in state.versions.values())

    def _load_plain(self, name: str, parameters: Mapping[str, str | bytes]) -> LoadPlan | None:
        """Load a model, unless it is an ensemble: then its plan."""
        with self._lock_of(name):
            plan = self._plan(name, parameters)
            if step_models(plan.config):
                return plan
            self._open(name, plan, None)
            self._ensembles.drop(name)  # which it may have been before
        self._ensembles.settle()
        return None

    def _lock_of(self, name: str) -> threading.Lock:
        """Whoever loads a model holds this."""
        with self._lock:
            return self._model_locks.setdefault(name, threading.Lock())

    def _plan(self, name: str, parameters: Mapping[str, str | bytes]) -> LoadPlan:
        """Read what the repository has of a model now. Raises PollFailedError."""
        if self.started:  # the start has just looked
            self._scan()
        folders = self._folders.get(name, [])
        try:
            if len(folders) != 1:
                raise PollError(
                    f"no folder of that name in {self._places()}"
                    if not folders
                    else f"it appears in more than one place: {', '.join(str(folder.path) for folder in folders)}"
                )
            return self._loader.plan(folders[0], parameters)
        except PollError as error:
            _log.error("cannot load '%s': %s", name, error)
            raise PollFailedError(f"failed to load '{name}', failed to poll from model repository") from error

    def open(self, name: str, plan: LoadPlan, steps: Steps | None) -> None:
        """Load the versions of a plan and let them serve. Raises RemoraError; then what served before goes on."""
        with self._lock_of(name):
            self._open(name, plan, steps)

    def _open(self, name: str, plan: LoadPlan, steps: Steps | None) -> None:
        begin_ns = self._clock.monotonic_ns()
        loaded: dict[int, VersionState] = {}
        failed: dict[int, RemoraError] = {}
        for number in plan.versions:
            try:
                model = self._loader.open(plan, number, steps)
                model.load_ns = self._clock.monotonic_ns() - begin_ns
                loaded[number] = VersionState(READY, model=model)
            except RemoraError as error:
                failed[number] = error
        self._publish(name, plan.versions, loaded, failed)

    def _publish(
        self, name: str, wanted: list[int], loaded: dict[int, VersionState], failed: dict[int, RemoraError]
    ) -> None:
        """Put a load's result into the table: all of it, or none (spec M04)."""
        with self._lock:
            before = self._table.get(name, ModelState())
            stopping = self.stopping  # then nobody would close what came into the table now
            if stopping:
                retired = [row.model for row in loaded.values()]
            elif wanted and not failed:
                gone = {
                    number: VersionState(UNAVAILABLE, UNLOADED)
                    for number in before.versions
                    if number not in loaded and before.versions[number].model is not None
                }
                self._table[name] = ModelState.of({**gone, **loaded})
                retired = [row.model for row in before.versions.values()]
            else:
                states = {number: VersionState(UNAVAILABLE, _sentence(error)) for number, error in failed.items()}
                kept = {number: row for number, row in before.versions.items() if row.model is not None}
                self._table[name] = ModelState.of({**states, **kept})
                retired = [row.model for row in loaded.values()]
        self._close(retired)
        if stopping:
            raise UnavailableError(f"load failed for model '{name}': the server is stopping")
        if not wanted:
            text = f"at least one version must be available under the version policy of model '{name}'\n"
            raise LoadFailedError(f"load failed for model '{name}': {text}", text)
        if failed:
            texts = "".join(
                f"version {number} is at {UNAVAILABLE} state: {_sentence(error)};\n" for number, error in failed.items()
            )
            for number, error in failed.items():
                _log.error("cannot load '%s' version %d: %s", name, number, error)
            raise LoadFailedError(f"load failed for model '{name}': {texts}", texts)

    # -- what ensembles ask of it: see ``ensemble_loading.Table`` ----------------------------------------------------

    def configs(self, name: str) -> dict[int, ModelConfig]:
        """The complete configurations of a model's ready versions."""
        state = self._table.get(name, _UNKNOWN)
        return {number: row.model.config for number, row in state.versions.items() if row.model is not None}

    def newest(self, name: str) -> ServedModel | None:
        """What serves of a model."""
        return self._table.get(name, _UNKNOWN).newest

    def failure(self, name: str) -> str:
        """What a model's last load failed with; "" when it did not."""
        return "".join(
            f"version {number} is at {UNAVAILABLE} state: {row.reason};\n"
            for number, row in sorted(self._table.get(name, _UNKNOWN).versions.items())
            if row.state == UNAVAILABLE and row.reason != UNLOADED
        )

    def _close(self, models: Iterable[ServedModel | None]) -> None:
        """Let go of models without making anyone wait."""
        for model in models:
            if model is None:
                continue
            thread = threading.Thread(target=model.close, name=f"remora close {model.name}", daemon=True)
            thread.start()
            with self._lock:
                self._closing = [other for other in self._closing if other.is_alive()] + [thread]

    def stop(self, timeout_s: float) -> bool:
        """Finish what is under way in all models, then close them. False when the time was not enough."""
        self.stopping = True
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        with self._lock:
            models = self.ready_models()
            self._table = {}
        done = True
        for model in models:
            left_s = max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0)
            done = model.close(left_s) and done
        for thread in self._closing:
            thread.join(max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0))
            done = done and not thread.is_alive()
        return done

    def _scan(self) -> None:
        found: dict[str, list[ModelFolder]] = {}
        for repository in self._repositories:
            for name, folders in repository.models().items():
                found.setdefault(name, []).extend(folders)
        self._folders = found

    def _places(self) -> str:
        return ", ".join(f"'{repository.location}'" for repository in self._repositories) or "no repository"


def open_repositories(options: EngineOptions) -> list[Repository]:
    """Every place that the options name. Raises NotFoundError for a URL that nothing understands."""
    return [
        *(open_repository(place, any_layout=True) for place in options.paths),
        *(open_repository(place) for place in options.model_repository),
    ]


def _model_is_fine(state: ModelState) -> bool:
    return bool(state.versions) and all(
        row.state == READY or (row.state == UNAVAILABLE and row.reason == UNLOADED) for row in state.versions.values()
    )


def _sentence(error: RemoraError) -> str:
    return f"{_CODE_WORDS[error.code]}: {error}"
