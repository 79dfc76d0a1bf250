"""Table of models with the state of each version.

Every request reads the table, without a lock. A change replaces the state of a model in one step, so that a reader sees
all of a load or nothing of it [M04]; replaced versions are returned to the caller for closing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol

from remora.errors import InvalidArgumentError, NotFoundError, RemoraError, UnavailableError
from remora.models.served_model import ServedModel
from remora.models.version import BEING_LOADED, RETIRED, Effect, Event, State, begin_load, step
from remora.repository.catalog import name_of

READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
_SHOWN = {
    State.LOADING: LOADING,
    State.RETRYING: LOADING,
    State.READY: READY,
    State.DRAINING: UNLOADING,
    State.CLOSING: UNLOADING,
    State.CLOSED: UNAVAILABLE,
    State.FAILED: UNAVAILABLE,
}
"""The states of the repository index, which are Triton's."""
_ALIAS_MARK = "@"
"""Between a model's name and an alias, as a client sends it."""
_LATEST = "latest"
"""Alias of the highest ready version."""


class LoadingError(UnavailableError):
    """Raised when the requested model is being loaded and the request may wait.

    Look it up again when ``ready`` is done, or report the error of ``ready`` to the client.
    """

    def __init__(self, message: str, ready: Future[None]) -> None:
        super().__init__(message)
        self.ready = ready


class VersionState(NamedTuple):
    """State of one version, as of its last change in the table.

    ``reason`` is text for people. ``model`` is set from READY until the version is closed.
    """

    state: State
    reason: str = ""
    model: ServedModel | None = None

    @staticmethod
    def of(model: ServedModel) -> VersionState:
        """Return the state of a version that has been opened."""
        if model.state is State.CLOSED:
            return VersionState(State.CLOSED, "unloaded")
        return VersionState(model.state, model=model)

    @property
    def shown(self) -> tuple[str, str]:
        """State and reason in the repository index, in Triton's words."""
        shown = _SHOWN[self.state]
        return shown, self.reason if shown == UNAVAILABLE else ""


_UNBEGUN = VersionState(State.WAITING)
_UNSERVED = BEING_LOADED | {State.FAILED}
_HEALTHY = RETIRED | {State.LOADING, State.READY}


class Replaced(NamedTuple):
    """Versions that a load retired, and those to keep that were unloaded meanwhile."""

    retired: list[ServedModel]
    unloaded: frozenset[int]


class Routing(Protocol):
    """Choice among the versions of a model that a release manages (`remora.models.rollout`)."""

    def primary(self, ready: Mapping[int, ServedModel]) -> ServedModel | None:
        """Return the version that stands for the model, None if none is ready."""

    def splits(self, ready: Mapping[int, ServedModel]) -> bool:
        """Return True if requests may go to several of the versions."""

    def route(self, ready: Mapping[int, ServedModel]) -> Any:
        """Return the model for one request, which chooses the version later (`RoutedModel`)."""

    def version_of(self, alias: str) -> int | None:
        """Return the version of an alias, or None."""


_NONE: Mapping[int, VersionState] = {}


class ModelState(NamedTuple):
    """State of one model. Immutable: a change puts a new object into the table.

    ``newest`` is the highest ready version, or the stable version of a release. ``direct`` is the same, or None while a
    release divides the requests among versions.
    """

    versions: Mapping[int, VersionState] = _NONE
    newest: ServedModel | None = None
    direct: ServedModel | None = None
    routing: Routing | None = None

    @staticmethod
    def of(versions: Mapping[int, VersionState], routing: Routing | None = None) -> ModelState:
        """Return the state with its highest ready version selected [M03].

        A release may select another one.
        """
        ready = _ready(versions)
        if routing is None:
            newest = ready[max(ready)] if ready else None
            return ModelState(versions, newest, newest)
        newest = routing.primary(ready)
        return ModelState(versions, newest, None if routing.splits(ready) else newest, routing)

    def serving(self) -> ServedModel | None:
        """Return the model for a request without a version, or None if none is ready."""
        if self.direct is not None or self.newest is None or self.routing is None:
            return self.direct
        routed: ServedModel = self.routing.route(self.ready)
        return routed

    def version(self, key: str, number: int) -> ServedModel:
        """Return a ready version. Raises NotFoundError or UnavailableError with the model's key."""
        row = self.versions.get(number)
        if row is None:
            raise NotFoundError(f"Request for unknown model: '{key}' version {number} is not found")
        if row.state is not State.READY or row.model is None:
            raise UnavailableError(f"Request for unknown model: '{key}' version {number} is not at ready state")
        return row.model

    @property
    def ready(self) -> dict[int, ServedModel]:
        """The versions that serve."""
        return _ready(self.versions)

    @property
    def ready_versions(self) -> list[int]:
        """The ready versions in ascending order."""
        return sorted(self.ready)

    @property
    def is_unloaded(self) -> bool:
        """True if the model was loaded once and has been unloaded."""
        return bool(self.versions) and all(row.state in RETIRED for row in self.versions.values())

    @property
    def is_fine(self) -> bool:
        """True unless a version that should serve does not [V01].

        A first load in progress counts as healthy.
        """
        return bool(self.versions) and all(row.state in _HEALTHY for row in self.versions.values())


def _ready(versions: Mapping[int, VersionState]) -> dict[int, ServedModel]:
    return {number: row.model for number, row in versions.items() if row.state is State.READY and row.model is not None}


UNKNOWN = ModelState()
Missing = Callable[[str, int, RemoraError], "ServedModel"]


def _refuse(name: str, version: int, error: RemoraError) -> NoReturn:
    raise error


class ModelTable:
    """Models by key: the name, or ``<namespace>::<name>`` (see `remora.repository.catalog`).

    Thread-safe.
    """

    def __init__(self, *, namespacing: bool = False) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, ModelState] = {}
        self._routings: dict[str, Routing] = {}
        self.only_model = ""
        """The name of the only model that serves; "" for none or several."""
        self._namespacing = namespacing
        self._closed = False
        self.missing: Missing = _refuse
        """Called when no version serves a request; raises, or returns the version that serves since then."""
        self.changed: Callable[[], None] = lambda: None
        """Called after each change of the versions that serve or of a routing, with the table's lock held."""

    # -- reading ----------------------------------------------------------------------------------------------------

    def resolve(self, name: str, version: int = -1) -> ServedModel:
        """Return a ready version. Version -1 selects the highest one.

        Raises NotFoundError or UnavailableError [H09], or what ``missing`` does.
        """
        state = self._states.get(name)
        if state is not None and version < 0 and state.direct is not None:
            return state.direct  # the usual case, kept short
        try:
            return self.look_up(name, version)
        except RemoraError as error:
            return self.missing(name, version, error)

    def look_up(self, name: str, version: int = -1) -> ServedModel:
        """Return a ready version as `resolve` does, without a call of ``missing``."""
        key = self._only_namesake(name) if self._namespacing and name not in self._states else name
        state = self._states.get(key)
        if state is None:
            if _ALIAS_MARK in name:
                return self._by_alias(name, version)
            raise NotFoundError(f"Request for unknown model: '{key}' is not found")
        if key != name and state.is_unloaded:  # Triton no longer knows its namespace
            raise NotFoundError(f"Identifier of model '{name}' is not found in global map")
        if version < 0:
            serving = state.serving()
            if serving is None:
                raise NotFoundError(f"Request for unknown model: '{key}' has no available versions")
            return serving
        return state.version(key, version)

    def _by_alias(self, name: str, version: int) -> ServedModel:
        """Return the version that ``MODEL@ALIAS`` names.

        Raises NotFoundError without such an alias, and as `look_up` for its version.
        """
        model, _, alias = name.rpartition(_ALIAS_MARK)
        key = self._only_namesake(model) if self._namespacing and model not in self._states else model
        state = self._states.get(key)
        number = state.routing.version_of(alias) if state is not None and state.routing is not None else None
        if alias == _LATEST and state is not None and state.ready_versions:
            number = state.ready_versions[-1]
        if state is None or number is None or version >= 0:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return state.version(key, number)

    def called(self, name: str) -> ModelState | None:
        """Return the state of the only model of this name in any namespace.

        Returns None for none or several.
        """
        state = self._states.get(name)
        if state is None and self._namespacing:
            with suppress(InvalidArgumentError):
                state = self._states.get(self._only_namesake(name))
        return state

    def _only_namesake(self, name: str) -> str:
        """Return the key of the only model of this name in any namespace [M15].

        Raises InvalidArgumentError.
        """
        keys = self.keys_of(name)
        in_use = [key for key in keys if not self._states.get(key, UNKNOWN).is_unloaded]
        if len(in_use) > 1:
            raise InvalidArgumentError(
                f"There are {len(in_use)} identifiers of model '{name}' in global map, model namespace must be "
                "provided to resolve ambiguity."
            )
        if not keys:
            raise InvalidArgumentError(f"Request for unknown model: '{name}' is not found")
        return (in_use or keys)[0]

    def acquire(self, name: str, version: int = -1) -> ServedModel:
        """Look up a version as `resolve` does and keep it open until its `ServedModel.release`."""
        while True:
            model = self.resolve(name, version)
            if model.acquire():
                return model  # else it is closing, and the table already has its replacement

    def state(self, key: str) -> ModelState | None:
        """Return the state of a model, or None if it was never loaded."""
        return self._states.get(key)

    def known(self) -> list[str]:
        """Return the keys of all models with a state."""
        return sorted(self._states)

    def keys_of(self, name: str) -> list[str]:
        """Return the keys of the models called ``name``."""
        return [key for key in self.known() if name_of(key) == name]

    def newest(self, key: str) -> ServedModel | None:
        """Return the highest ready version of a model."""
        return self._states.get(key, UNKNOWN).newest

    def serving(self, key: str) -> dict[int, ServedModel]:
        """Return the ready versions of a model."""
        return self._states.get(key, UNKNOWN).ready

    def ready_models(self) -> list[ServedModel]:
        """Return all ready versions, by name and version."""
        states = [state for _, state in sorted(self._states.items())]
        return [model for state in states for _, model in sorted(state.ready.items())]

    def is_fine(self) -> bool:
        """Return True if every model that should serve does."""
        return all(state.is_fine for state in self._states.values())

    def troubles(self) -> list[str]:
        """Return why models that should serve do not, one line per version."""
        lines: list[str] = []
        for key, state in sorted(self._states.items()):
            if not state.versions:
                lines.append(f"model '{key}' has no version to serve")
            for number, row in sorted(state.versions.items()):
                if row.state in _UNSERVED:
                    why = f": {row.reason}" if row.reason else ""
                    lines.append(f"model '{key}' version {number} is {_SHOWN[row.state]}{why}")
        return lines

    def fatal(self) -> str:
        """Return why the process must be restarted, or "".

        The first model that needs a restart gives the reason.
        """
        for model in self.ready_models():
            if model.fatal:
                return f"model '{model.name}' version {model.version}: {model.fatal}"
        return ""

    def failure(self, key: str) -> str:
        """Return the error of a model's last load, or "" if it succeeded."""
        return "".join(
            f"version {number} is at {UNAVAILABLE} state: {row.reason};\n"
            for number, row in sorted(self._states.get(key, UNKNOWN).versions.items())
            if row.state is State.FAILED
        )

    # -- changing ---------------------------------------------------------------------------------------------------

    def begin(self, key: str, versions: Iterable[int]) -> None:
        """Mark versions as loading. Ready versions continue to serve."""

        def loading(rows: dict[int, VersionState]) -> None:
            for number in versions:
                row = rows.get(number, _UNBEGUN)
                if row.state is not State.READY:
                    state = begin_load(row.state)
                    rows[number] = VersionState(state, row.reason if state is State.RETRYING else "")

        self._change(key, loading)

    def replace(self, key: str, loaded: Mapping[int, ServedModel], kept: Collection[int]) -> Replaced | None:
        """Publish a successful load: ``loaded`` and ``kept`` serve from now on.

        Returns None if the table has been cleared meanwhile.
        """
        retired: list[ServedModel] = []
        unloaded: set[int] = set()

        def publish(rows: dict[int, VersionState]) -> None:
            unloaded.update(number for number in kept if rows.get(number, _UNBEGUN).state is not State.READY)
            retired.extend(_retire(rows, [number for number in rows if number not in kept]))
            for number, model in loaded.items():
                model.send(Event.PUBLISHED)
                rows[number] = VersionState.of(model)

        return Replaced(retired, frozenset(unloaded)) if self._change(key, publish) else None

    def fail(self, key: str, reasons: Mapping[int, str]) -> None:
        """Record a failed load. Ready versions continue to serve, the others become unavailable."""

        def publish(rows: dict[int, VersionState]) -> None:
            for number, reason in reasons.items():
                row = rows.get(number, _UNBEGUN)
                if row.state is not State.READY:
                    rows[number] = VersionState(step(begin_load(row.state), Event.FAILED).state, reason)
            _retire(rows, [number for number in rows if number not in reasons and rows[number].state in _UNSERVED])
            for number, row in list(rows.items()):
                if number not in reasons and row.state is State.CLOSED:
                    del rows[number]  # because Triton lists only the versions of the last load after a failure

        self._change(key, publish)

    def retire(self, key: str) -> list[ServedModel]:
        """Mark the ready versions of a model as unloading and return them.

        A load in progress goes on, because an unload does not wait for it.
        """
        retired: list[ServedModel] = []
        if key not in self._states:
            return retired

        def publish(rows: dict[int, VersionState]) -> None:
            retired.extend(_retire(rows, _ready(rows)))

        self._change(key, publish)
        return retired

    def forget(self, key: str) -> None:
        """Drop a model that never became ready and is no longer wanted."""
        with self._lock:
            state = self._states.get(key)
            if state is not None and all(row.shown[0] == UNAVAILABLE for row in state.versions.values()):
                self._put({other: kept for other, kept in self._states.items() if other != key})

    def closed(self, key: str, model: ServedModel) -> None:
        """Show that a retired version is closed, unless a later load of it has begun."""

        def publish(rows: dict[int, VersionState]) -> None:
            row = rows.get(model.version, _UNBEGUN)
            if row.model is model:
                rows[model.version] = VersionState.of(model)

        if key in self._states:
            self._change(key, publish)

    def clear(self) -> list[ServedModel]:
        """Remove all models, refuse any later change, and return the versions that served."""
        with self._lock:
            models = self.ready_models()
            for model in models:
                model.send(Event.RETIRE)
            self._put({})
            self._closed = True
        return models

    def route(self, key: str, routing: Routing | None) -> None:
        """Divide the requests to a model by ``routing`` from now on, or not at all with None."""
        with self._lock:
            self._routings = {each: kept for each, kept in self._routings.items() if each != key}
            if routing is not None:
                self._routings[key] = routing
            state = self._states.get(key)
            if state is not None and not self._closed:
                self._put({**self._states, key: ModelState.of(state.versions, routing)})

    def reroute(self, key: str) -> None:
        """Recompute the route of a model, because its routing has changed."""
        with self._lock:
            state = self._states.get(key)
            if state is not None and not self._closed:
                self._states[key] = ModelState.of(state.versions, self._routings.get(key))

    def drop_failures(self, key: str, versions: Iterable[int]) -> None:
        """Forget failed loads of versions that are not wanted any more."""

        def publish(rows: dict[int, VersionState]) -> None:
            _retire(rows, [number for number in versions if rows.get(number, _UNBEGUN).state is State.FAILED])

        if key in self._states:
            self._change(key, publish)

    def _change(self, key: str, change: Callable[[dict[int, VersionState]], None]) -> bool:
        """Apply a change and return False if the table has been cleared."""
        with self._lock:
            if self._closed:
                return False
            rows = dict(self._states.get(key, UNKNOWN).versions)
            change(rows)
            self._put({**self._states, key: ModelState.of(rows, self._routings.get(key))})
            return True

    def _put(self, states: dict[str, ModelState]) -> None:
        before, self._states = self._states, states
        names = {state.newest.name for state in states.values() if state.newest is not None}
        self.only_model = names.pop() if len(names) == 1 else ""
        if _served(states) != _served(before):
            self.changed()


def _retire(rows: dict[int, VersionState], numbers: Iterable[int]) -> list[ServedModel]:
    """Retire versions, and return those that must drain before they are closed."""
    retired: list[ServedModel] = []
    for number in numbers:
        row = rows[number]
        effect = step(row.state, Event.RETIRE).effect
        if effect is Effect.FORGET:
            del rows[number]
        if effect is Effect.DRAIN and row.model is not None:
            row.model.send(Event.RETIRE)
            rows[number] = VersionState.of(row.model)
            retired.append(row.model)
    return retired


def _served(states: Mapping[str, ModelState]) -> dict[str, tuple[object, ...]]:
    """Return what answers the requests to each model."""
    return {key: (state.routing, *state.ready.values()) for key, state in states.items() if state.newest is not None}
