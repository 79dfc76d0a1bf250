"""Desired state of the models, set by startup, clients, polls and on-demand loads.

`model_set` loads and unloads models, `polling` follows the repositories, `on_demand` follows the requests, and
`readiness` decides whether the engine accepts traffic.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remora import plugins
from remora.calls import IndexEntry
from remora.errors import InvalidArgumentError, RemoraError, UnavailableError
from remora.model_files import RELEASE_FILE, RELEASE_STATE_FILE, RELEASE_STATE_FOLDER
from remora.models.load_log import CLIENT, REQUEST, Failures, occasion
from remora.models.loader import ModelLoader
from remora.models.model_set import ModelSet
from remora.models.planner import brings_files, open_repositories
from remora.models.readiness import Readiness, ReadinessState, resolve_future
from remora.models.served_model import ServedModel
from remora.models.table import READY, UNAVAILABLE, LoadingError, ModelState, ModelTable
from remora.models.version import State
from remora.options import EngineOptions
from remora.options.observation import SHADOW_PROCESSORS
from remora.repository.catalog import Catalog, name_of
from remora.system.clock import Clock

if TYPE_CHECKING:  # few servers poll, load on demand or release versions
    from remora.models.on_demand import OnDemand
    from remora.models.polling import RepositoryPolls
    from remora.models.rollout import Releases, Shadows
    from remora.repository import ModelFolder

_log = logging.getLogger("remora.models")

_NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
_DUPLICATE = "model appears in two or more repositories"


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
        self.table = ModelTable(namespacing=options.model_namespacing)
        self.models = ModelSet(options, loader, clock, self._catalog, self.table)
        self._on_demand = self._make_on_demand() if options.model_control_mode == "ondemand" else None
        self._failures: Failures = {}
        """Failures that startup and polls have logged."""
        self._polls: RepositoryPolls | None = None
        self._readiness = ReadinessState(options, self.table, loader.gpu_count, self._catalog.unseen)
        self.table.missing = self._missing
        if loader.cache is not None:
            self.table.changed = loader.cache.models_changed  # at once, because the answers of ensembles change
        self._releases: Releases | None = None
        self._shadows = self._open_shadows()
        self._releases_lock = threading.Lock()
        self.models.release_by(self._selection, self._release_failed)

    def _open_shadows(self) -> Shadows | None:
        """Return the shadows that the options name, None for none. Raises ConfigError."""
        options = self._options
        named = options.shadow_url or options.shadow_compare or options.shadow_differences
        if not named and options.shadow_processors == SHADOW_PROCESSORS:
            return None
        shadows: Shadows = plugins.load_for("a shadow", plugins.SHADOWS)(options, self._clock)
        return shadows

    def _make_on_demand(self) -> OnDemand:
        from remora.models.on_demand import OnDemand

        return OnDemand(self._load_one, self._clock)

    # -- releases ---------------------------------------------------------------------------------------------------

    @property
    def releases(self) -> Releases:
        """The releases of the models, which most servers never use. Raises InternalError."""
        from remora.models.release_store import ReleaseStore

        with self._releases_lock:
            if self._releases is None:
                store = ReleaseStore(self._release_file())
                open_releases = plugins.load_for("a release", plugins.RELEASES)
                self._releases = open_releases(self.models, self._clock, store, self._shadows)
            return self._releases

    @property
    def has_releases(self) -> bool:
        """True if a model has or had a release, in this process or before."""
        return self._releases is not None

    def _release_file(self) -> Path | None:
        """Return the file of the stored releases, None without a folder for it."""
        if self._options.release_directory:
            return Path(self._options.release_directory, RELEASE_STATE_FILE)
        for repository in self._catalog.repositories:
            place = Path(repository.location)
            if "://" not in repository.location and place.is_dir():
                return place / RELEASE_STATE_FOLDER / RELEASE_STATE_FILE
        return None

    def _selection(self, key: str, folder: ModelFolder) -> Callable[[list[int]], list[int]] | None:
        """Return how a release selects versions (see `Planner.selection`). Raises RemoraError."""
        declared = folder.path / RELEASE_FILE
        is_declared = declared.is_file()
        if self._releases is None and not is_declared:
            return None
        available = sorted(folder.versions)
        if is_declared:
            self.releases.declare(key, declared.read_bytes(), available)
        return lambda by_policy: self.releases.select(key, by_policy, available)

    def _release_failed(self, key: str, errors: Mapping[int, str]) -> bool:
        return self._releases is not None and self._releases.failed(key, errors)

    def _resume_releases(self) -> None:
        """Go on with the releases of an earlier process."""
        file = self._release_file()
        if file is not None and file.is_file():
            _log.info("the releases in '%s' go on", self.releases.stored_at)

    # -- reading ----------------------------------------------------------------------------------------------------

    def resolve(self, name: str, version: int = -1) -> ServedModel:
        """Look up a version (see `ModelTable.resolve`)."""
        return self.table.resolve(name, version)

    def acquire(self, name: str, version: int = -1) -> ServedModel:
        """Acquire a version (see `ModelTable.acquire`)."""
        return self.table.acquire(name, version)

    def state(self, name: str) -> ModelState | None:
        """Return the state of a model, or None if it was never loaded."""
        return self.table.state(name)

    def ready_models(self) -> list[ServedModel]:
        """Return all ready versions, by name and version."""
        return self.table.ready_models()

    def only_model(self) -> str:
        """Return the name of the only model, or "" for none or several.

        Models that are loaded or can be loaded on demand count. Raises LoadingError during startup, because more models
        may follow.
        """
        if not self._readiness.started and self._options.wait_for_models:
            raise LoadingError("the models are still being loaded", self._readiness.start)
        if self._on_demand is None:
            return self.table.only_model
        names = {name_of(key) for key in self._catalog.models()}
        return names.pop() if len(names) == 1 else ""

    def is_live(self) -> bool:
        """Return True unless some model needs a restart of the process."""
        return self._readiness.is_live()

    def is_ready(self) -> bool:
        """Return True if the engine accepts traffic (see `ReadinessState.is_ready`)."""
        return self._readiness.is_ready()

    def readiness(self) -> Readiness:
        """Return the readiness and the reasons against it."""
        return self._readiness.now()

    def hold_readiness(self, reason: str) -> Callable[[], None]:
        """Make the engine not ready for ``reason`` until the returned function is called.

        Any thread may call it, once.
        """
        return self._readiness.hold(reason)

    def begin_drain(self) -> None:
        """Report "not ready" from now on, and serve on."""
        self._readiness.draining = True

    def _missing(self, name: str, version: int, error: RemoraError) -> ServedModel:
        """Raise LoadingError if the request may wait for a load, else look the version up again.

        The second look-up serves a request whose model became ready after the first one.
        """
        if self._readiness.stopping:
            raise UnavailableError(f"the server is stopping: request for model '{name}' is refused") from error
        if not self._readiness.started and self._options.wait_for_models:
            raise LoadingError(f"model '{name}' is still being loaded", self._readiness.start) from error
        if self._on_demand is not None and self._catalog.is_offered(name) and self.table.newest(name) is None:
            raise LoadingError(f"model '{name}' is being loaded", self._on_demand.request_load(name)) from error
        return self.table.look_up(name, version)

    def is_model_ready(self, name: str, version: int) -> bool:
        """Return True if a request would be served [H05].

        Raises NotFoundError or UnavailableError [H09].
        """
        idle = self._on_demand is not None and self.table.newest(name) is None and not self.table.failure(name)
        if idle and version < 0 and self._catalog.is_offered(name):
            return True  # its first request would load it
        model = self.table.look_up(name, version)
        return not model.trouble and model.says_ready()

    @property
    def loads_on_request(self) -> bool:
        """True if `load` and `unload` are allowed."""
        return self._options.model_control_mode in ("explicit", "ondemand")

    def decides_readiness(self, name: str, version: int) -> bool:
        """Return True if `is_model_ready` may wait for the model's own answer."""
        try:
            return self.table.look_up(name, version).decides_readiness
        except RemoraError:
            return False

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
        self._catalog.scan(forgiving=True)
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
                unhealthy = row.model.trouble if row.model is not None and row.state is State.READY else ""
                shown = (UNAVAILABLE, unhealthy) if unhealthy else row.shown
                if not ready or shown[0] == READY:
                    entries.append(IndexEntry(name, str(number), *shown))
        return entries

    # -- desired state ------------------------------------------------------------------------------------------------

    def start(self) -> dict[str, RemoraError]:
        """Load the models of the startup and return the failures by model name.

        Raises NotFoundError when a repository does not exist, unless ``exit_on_error`` is off: the engine then serves
        what it has and is not ready until the repository was read.
        """
        try:
            self._resume_releases()
            self._catalog.scan(forgiving=not self._options.exit_on_error)
            if self._catalog.repositories and not self._catalog.all_keys():
                self._warn_of_no_models()
            with occasion("", self._failures):
                wanted, failures = self._wanted_at_start()
                failures.update(self.models.load_many(wanted))
                self.models.request_loads(wanted)
        except BaseException:
            resolve_future(self._readiness.start, UnavailableError("startup aborted: the models could not be loaded"))
            raise
        self._readiness.started = True
        if reason := self._readiness.idle_gpu():
            _log.error("not ready: %s", reason)
        resolve_future(self._readiness.start)
        polls = self._options.model_control_mode in ("poll", "ondemand") and self._options.repository_poll_secs > 0
        if polls and not self._readiness.stopping:
            opened = self._open_polls()
            opened.start(self._options.repository_poll_secs)
            if self._readiness.stopping:  # a stop since the check above did not see the polls
                opened.stop()
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
        """Return the models to load at startup.

        Also returns the errors of those that are missing or ambiguous.
        """
        named = list(dict.fromkeys(self._options.load_model))
        if "*" in named and len(named) > 1:
            raise InvalidArgumentError("--load-model=* stands for all models: give it alone, or only names")
        if self._options.model_control_mode in ("none", "poll") or "*" in named:
            twice = [key for key in self._catalog.all_keys() if self._catalog.is_ambiguous(key)]
            return self._catalog.models(), {key: self.models.not_offered(key) for key in twice}
        nowhere = [name for name in named if not self._catalog.keys_of(name)]
        keys = [key for name in named for key in self._catalog.keys_of(name)]
        return keys, {name: self.models.not_offered(name) for name in nowhere}

    def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model and wait for completion [M09].

        Raises RemoraError with Triton's texts.
        """
        if not self.loads_on_request:
            raise UnavailableError(_NOT_ALLOWED)
        if brings_files(parameters):
            keys = [name]
        else:
            self._catalog.scan(name, forgiving=True)
            keys = self._catalog.keys_of(name)
        if not keys:
            raise self.models.not_offered(name)
        with occasion(CLIENT):
            for key in keys:
                self.models.load(key, parameters)
            self.models.request_loads(keys)

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model. Requests in flight are finished in the background [M12].

        ``unload_dependents``: also unload the models that were loaded only for this ensemble.
        """
        if not self.loads_on_request:
            raise UnavailableError(_NOT_ALLOWED)
        with occasion(CLIENT):
            for key in self.table.keys_of(name) or [name]:
                self.models.drop(key, with_models=unload_dependents)
            self.models.reconcile_ensembles()

    def _load_one(self, key: str) -> None:
        """Load a model for a request."""
        with occasion(REQUEST):
            self.models.load(key)
            self.models.request_loads((key,))

    def poll(self) -> dict[str, RemoraError]:
        """Reconcile the loaded models with the repositories [M06] and return the failures."""
        return self._open_polls().poll()

    def _open_polls(self) -> RepositoryPolls:
        from remora.models.polling import RepositoryPolls

        if self._polls is None:
            self._polls = RepositoryPolls(
                self.models, self._catalog, self._failures, only_serving=self._on_demand is not None
            )
        return self._polls

    # -- shutdown ------------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float) -> bool:
        """Finish requests in flight and close all models. Return False on timeout."""
        self._readiness.stopping = True
        if self._polls is not None:
            self._polls.stop()
        self.models.loads.end()
        error = UnavailableError("the server is stopping, and the model is not loaded yet")
        resolve_future(self._readiness.start, error)
        if self._on_demand is not None:
            self._on_demand.stop(error)
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        done = True
        if self._releases is not None:
            self._releases.close()  # before the models, because copies would wait for them and fail
        for model in self.table.clear():
            remaining_s = max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0)
            done = model.close(remaining_s) and done
        if self._shadows is not None:
            self._shadows.close()
        return self.wait_until_closed(max((end_ns - self._clock.monotonic_ns()) / 1e9, 0.0)) and done

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Wait until the models that were unloaded or replaced are closed. Return False on timeout."""
        return self.models.loads.wait_until_closed(timeout_s)
