"""Which model versions serve: loading, the table of what is loaded, unloading.

The table is read without a lock by every request and written under one. Loads run side by side on a bounded pool; a
load replaces a model's versions in one step, when all of them are ready (spec M04). What is replaced finishes its
requests and is closed by a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from remora.errors import InternalError, InvalidArgumentError, NotFoundError, RemoraError, UnavailableError
from remora.loading import ModelLoader, PollError
from remora.messages import IndexEntry
from remora.model import ServedModel
from remora.options import EngineOptions
from remora.repository.local import ModelFolder, scan, scan_repository
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


@dataclass(frozen=True, slots=True)
class VersionState:
    """What is known of one version; ``model`` only while READY."""

    state: str
    reason: str = ""
    model: ServedModel | None = None


@dataclass(frozen=True, slots=True)
class ModelState:
    """What is known of one model. Immutable: a change puts another one into the table."""

    versions: Mapping[int, VersionState] = field(default_factory=dict)
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
        self._folders: dict[str, list[ModelFolder]] = {}
        self._model_locks: dict[str, threading.Lock] = {}
        self._closing: list[threading.Thread] = []
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
                if not ready or row.state == READY:
                    entries.append(IndexEntry(name, str(number), row.state, row.reason))
        return entries

    # -- changing ---------------------------------------------------------------------------------------------------

    def start(self) -> dict[str, RemoraError]:
        """Load what is to be loaded at start; returns what could not be, by model name.

        Raises NotFoundError when a repository is not there, and UnavailableError for a name that no repository has.
        """
        self._scan()
        wanted = self._wanted_at_start()
        failures: dict[str, RemoraError] = {}

        def load_one(name: str) -> None:
            try:
                self._load(name, {})
            except RemoraError as error:
                failures[name] = error

        if len(wanted) == 1:
            load_one(wanted[0])  # no thread for the most common case
        elif wanted:
            workers = max(1, min(self._options.model_load_thread_count, len(wanted)))
            with ThreadPoolExecutor(workers, thread_name_prefix="remora load") as pool:
                list(pool.map(load_one, wanted))
        self.started = True
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
        self._load(name, parameters)

    def unload(self, name: str) -> None:
        """Take a model out of service; what runs is finished in the background (spec M12)."""
        if self._options.model_control_mode != "explicit":
            raise UnavailableError(_NOT_ALLOWED)
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

    def _load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        with self._lock:
            model_lock = self._model_locks.setdefault(name, threading.Lock())
        with model_lock:
            self._load_locked(name, parameters)

    def _load_locked(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        self._scan()
        folders = self._folders.get(name, [])
        try:
            if len(folders) != 1:
                raise PollError(
                    f"no folder of that name in {self._places()}"
                    if not folders
                    else f"it appears in more than one place: {', '.join(str(folder.path) for folder in folders)}"
                )
            plan = self._loader.plan(folders[0], parameters)
        except PollError as error:
            _log.error("cannot load '%s': %s", name, error)
            raise InternalError(f"failed to load '{name}', failed to poll from model repository") from error
        begin_ns = self._clock.monotonic_ns()
        loaded: dict[int, VersionState] = {}
        failed: dict[int, RemoraError] = {}
        for number in plan.versions:
            try:
                model = self._loader.open(plan, number)
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
            raise InvalidArgumentError(f"load failed for model '{name}': {text}")
        if failed:
            texts = "".join(
                f"version {number} is at {UNAVAILABLE} state: {_sentence(error)};\n" for number, error in failed.items()
            )
            for number, error in failed.items():
                _log.error("cannot load '%s' version %d: %s", name, number, error)
            raise InvalidArgumentError(f"load failed for model '{name}': {texts}")

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
        found = scan(self._options.paths)
        for repository in self._options.model_repository:
            for name, folders in scan_repository(repository).items():
                found.setdefault(name, []).extend(folders)
        self._folders = found

    def _places(self) -> str:
        return (
            ", ".join(f"'{place}'" for place in (*self._options.model_repository, *self._options.paths))
            or "no repository"
        )


def _model_is_fine(state: ModelState) -> bool:
    return bool(state.versions) and all(
        row.state == READY or (row.state == UNAVAILABLE and row.reason == UNLOADED) for row in state.versions.values()
    )


def _sentence(error: RemoraError) -> str:
    return f"{_CODE_WORDS[error.code]}: {error}"
