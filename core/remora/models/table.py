"""The table of models: what is known of each version, and which serves; the law: it is read without a lock.

Every request looks here. A change puts a new state of a model into the table in one step, so that a reader sees all of
a load or nothing of it [M04]; what it takes out is handed back for somebody else to close.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, NoReturn

from remora.errors import InvalidArgumentError, NotFoundError, RemoraError, UnavailableError
from remora.models.served_model import ServedModel
from remora.repository.catalog import name_of

READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
UNLOADED = "unloaded"


class LoadingError(UnavailableError):
    """What would serve is being loaded, and the request may wait: look again when ``ready`` is done, or tell the client
    of the error that it ends with."""

    def __init__(self, message: str, ready: Future[None]) -> None:
        super().__init__(message)
        self.ready = ready


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
        """The state with its highest ready version picked out [M03]."""
        ready = [number for number, row in versions.items() if row.model is not None]
        return ModelState(versions, versions[max(ready)].model if ready else None)

    @property
    def ready_versions(self) -> list[int]:
        """Ascending."""
        return sorted(number for number, row in self.versions.items() if row.model is not None)

    @property
    def is_unloaded(self) -> bool:
        """Whether it served once, and is to serve no more."""
        return bool(self.versions) and all(
            row.state == UNLOADING or row.reason == UNLOADED for row in self.versions.values()
        )

    @property
    def is_fine(self) -> bool:
        """Whether nothing that should serve cannot [V01]; what loads for the first time does no harm."""
        return bool(self.versions) and all(
            row.state in (READY, UNLOADING) or (row.state == LOADING and not row.reason) or row.reason == UNLOADED
            for row in self.versions.values()
        )


UNKNOWN = ModelState()
Missing = Callable[[str, int, RemoraError], NoReturn]


def _refuse(name: str, version: int, error: RemoraError) -> NoReturn:
    raise error


class ModelTable:
    """Models by key: the name, or ``<namespace>::<name>`` (see `remora.repository.catalog`). Thread-safe."""

    def __init__(self, *, namespacing: bool = False) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, ModelState] = {}
        self.only_model = ""
        """The name of the one model that serves; "" when none does, or several do."""
        self._namespacing = namespacing
        self._closed = False
        self.missing: Missing = _refuse
        """Is asked when nothing serves a request, and raises."""

    # -- reading ----------------------------------------------------------------------------------------------------

    def resolve(self, name: str, version: int = -1) -> ServedModel:
        """The version that serves; -1 for the highest ready one.

        Raises NotFoundError or UnavailableError [H09], or what ``missing`` does.
        """
        state = self._states.get(name)
        if state is not None and version < 0 and state.newest is not None:
            return state.newest  # the usual case, kept short
        try:
            return self.look_up(name, version)
        except RemoraError as error:
            self.missing(name, version, error)

    def look_up(self, name: str, version: int = -1) -> ServedModel:
        """As `resolve`, but ``missing`` is not asked."""
        key = self._only_namesake(name) if self._namespacing and name not in self._states else name
        state = self._states.get(key)
        if state is None:
            raise NotFoundError(f"Request for unknown model: '{key}' is not found")
        if key != name and state.is_unloaded:  # Triton has forgotten which namespace it had
            raise NotFoundError(f"Identifier of model '{name}' is not found in global map")
        if version < 0:
            if state.newest is None:
                raise NotFoundError(f"Request for unknown model: '{key}' has no available versions")
            return state.newest
        row = state.versions.get(version)
        if row is None:
            raise NotFoundError(f"Request for unknown model: '{key}' version {version} is not found")
        if row.model is None:
            raise UnavailableError(f"Request for unknown model: '{key}' version {version} is not at ready state")
        return row.model

    def called(self, name: str) -> ModelState | None:
        """What is known of the one model of this name, whatever its namespace; None for none and for several."""
        state = self._states.get(name)
        if state is None and self._namespacing:
            with suppress(InvalidArgumentError):
                state = self._states.get(self._only_namesake(name))
        return state

    def _only_namesake(self, name: str) -> str:
        """The key of the model of this name, whatever its namespace [M15]. Raises InvalidArgumentError."""
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

    def borrow(self, name: str, version: int = -1) -> ServedModel:
        """As `resolve`, and keeps the model from being closed until it is given back."""
        while True:
            model = self.resolve(name, version)
            if model.borrow():
                return model  # else it is being closed, and the table has said so since

    def state(self, key: str) -> ModelState | None:
        """What is known of a model; None for one that was never loaded."""
        return self._states.get(key)

    def known(self) -> list[str]:
        """Every model that was ever loaded, or should have been."""
        return sorted(self._states)

    def keys_of(self, name: str) -> list[str]:
        """The keys of the models called ``name``."""
        return [key for key in self.known() if name_of(key) == name]

    def newest(self, key: str) -> ServedModel | None:
        """What serves of a model."""
        return self._states.get(key, UNKNOWN).newest

    def serving(self, key: str) -> dict[int, ServedModel]:
        """The versions of a model that serve."""
        rows = self._states.get(key, UNKNOWN).versions
        return {number: row.model for number, row in rows.items() if row.model is not None}

    def ready_models(self) -> list[ServedModel]:
        """All versions that serve, by name and version."""
        rows = [row for _, state in sorted(self._states.items()) for _, row in sorted(state.versions.items())]
        return [row.model for row in rows if row.model is not None]

    def is_fine(self) -> bool:
        """Whether every model that should serve does."""
        return all(state.is_fine for state in self._states.values())

    def troubles(self) -> list[str]:
        """What keeps models from serving that should, a line for each version."""
        lines: list[str] = []
        for key, state in sorted(self._states.items()):
            if not state.versions:
                lines.append(f"model '{key}' has no version to serve")
            for number, row in sorted(state.versions.items()):
                if row.state == LOADING or (row.state == UNAVAILABLE and row.reason != UNLOADED):
                    lines.append(f"model '{key}' version {number} is {row.state}{': ' * bool(row.reason)}{row.reason}")
        return lines

    def fatal(self) -> str:
        """Why the process must be restarted, for the first model that cannot serve before; empty when it need not."""
        for model in self.ready_models():
            if model.fatal:
                return f"model '{model.name}' version {model.version}: {model.fatal}"
        return ""

    def failure(self, key: str) -> str:
        """What a model's last load failed with; "" when it did not."""
        return "".join(
            f"version {number} is at {UNAVAILABLE} state: {row.reason};\n"
            for number, row in sorted(self._states.get(key, UNKNOWN).versions.items())
            if row.state == UNAVAILABLE and row.reason != UNLOADED
        )

    # -- changing ---------------------------------------------------------------------------------------------------

    def begin(self, key: str, versions: Iterable[int]) -> None:
        """A load has begun; what serves goes on serving."""

        def loading(rows: dict[int, VersionState]) -> None:
            for number in versions:
                row = rows.get(number)
                if row is None or row.model is None:
                    failed = row is not None and row.reason != UNLOADED
                    rows[number] = VersionState(LOADING, row.reason if row is not None and failed else "")

        self._change(key, loading)

    def replace(self, key: str, loaded: Mapping[int, ServedModel], kept: Collection[int]) -> list[ServedModel] | None:
        """A load has gone well: what it loaded and ``kept`` serve from now on. Returns what serves no more.

        None when the table was cleared meanwhile, and takes nothing any more.
        """
        retired: list[ServedModel] = []

        def publish(rows: dict[int, VersionState]) -> None:
            for number, row in list(rows.items()):
                if number in kept:
                    continue
                if row.model is not None:
                    retired.append(row.model)
                    rows[number] = VersionState(UNLOADING)
                elif number not in loaded and row.state != UNLOADING and row.reason != UNLOADED:
                    del rows[number]  # an older failure
            rows.update({number: VersionState(READY, model=model) for number, model in loaded.items()})

        return retired if self._change(key, publish) else None

    def fail(self, key: str, reasons: Mapping[int, str]) -> None:
        """A load has failed: what served before goes on, the rest is not available for these reasons."""

        def publish(rows: dict[int, VersionState]) -> None:
            for number, row in list(rows.items()):
                if row.model is None and row.state != UNLOADING:
                    del rows[number]
            for number, reason in reasons.items():
                if number not in rows or rows[number].model is None:
                    rows[number] = VersionState(UNAVAILABLE, reason)

        self._change(key, publish)

    def retire(self, key: str) -> list[ServedModel]:
        """End the service of a model; returns what served."""
        retired: list[ServedModel] = []
        if key not in self._states:
            return retired

        def publish(rows: dict[int, VersionState]) -> None:
            retired.extend(row.model for row in rows.values() if row.model is not None)
            rows.update({number: VersionState(UNLOADING) for number, row in rows.items() if row.model is not None})

        self._change(key, publish)
        return retired

    def forget(self, key: str) -> None:
        """A model that never served is wished no longer: nothing of it needs to be known."""
        with self._lock:
            state = self._states.get(key)
            if state is not None and all(row.state == UNAVAILABLE for row in state.versions.values()):
                self._put({other: kept for other, kept in self._states.items() if other != key})

    def closed(self, key: str, version: int) -> None:
        """What was retired of a version is closed now."""

        def publish(rows: dict[int, VersionState]) -> None:
            if version in rows and rows[version].state == UNLOADING:
                rows[version] = VersionState(UNAVAILABLE, UNLOADED)

        if key in self._states:
            self._change(key, publish)

    def clear(self) -> list[ServedModel]:
        """Take everything out, and nothing in from now on; returns what served."""
        with self._lock:
            models = self.ready_models()
            self._put({})
            self._closed = True
        return models

    def _change(self, key: str, change: Callable[[dict[int, VersionState]], None]) -> bool:
        """Whether the change was made: a table that was cleared takes none."""
        with self._lock:
            if self._closed:
                return False
            rows = dict(self._states.get(key, UNKNOWN).versions)
            change(rows)
            self._put({**self._states, key: ModelState.of(rows)})
            return True

    def _put(self, states: dict[str, ModelState]) -> None:
        self._states = states
        names = {state.newest.name for state in states.values() if state.newest is not None}
        self.only_model = names.pop() if len(names) == 1 else ""
