"""The models of a multi-model endpoint: each has an engine of its own; the law: a URL never leads out of its root.

The platform names a model by an opaque string and says where it has unpacked it. An engine for each means that names
inside one model meet no other's, that an ensemble comes and goes with its steps, and that DELETE can wait until the
memory is free. The table is the event loop's, but for `forget`, which work in other threads calls at its end: so it is
looked at in copies, which are made at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from remora.calls import RepositoryIndex
from remora.config import find_config, read_config
from remora.engine import Engine
from remora.errors import ConfigError, InvalidArgumentError, RemoraError
from remora.models.served_model import ServedModel
from remora.server.http.rest import RestService
from remora.system.tuning import give_back
from remora_adapters.sagemaker.layout import Layout, find_models

_log = logging.getLogger("remora.sagemaker")

_UNLOAD_S = 350.0
"""The platform waits 360 s for a DELETE."""
_STOP_S = 2.0
_MAX_FAILED = 1024
_PART = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._\-]*")


@dataclass(slots=True)
class Hosted:
    """One model of the endpoint. ``rest`` answers for it, under the name ``inner`` that its folder has; None while it
    is being loaded or closed. ``target`` is what clients call it, ``script`` whether it is an ``inference.py``."""

    name: str
    url: str
    target: str
    inner: str = ""
    script: bool = False
    engine: Engine | None = None
    rest: RestService | None = None


class HostedModels:
    """The table of models. `add` and `remove` are called in the loop; the work they return is run in other threads.

    Args:
        root: every model's URL is a folder below it, ``<root>/<id>/model[/...]``.
        main: the server's own engine: theirs have its options, all but where their models are, and its traces.
        scratch: where generated files may be put.
        over: makes the service of an engine, which its answers call by the second argument.
        find: looks at a model's folder, with a place for generated files.
    """

    def __init__(
        self,
        root: Path,
        main: Engine,
        scratch: Path,
        over: Callable[[Engine, str], RestService],
        find: Callable[[Path, Path], Layout] = find_models,
    ) -> None:
        self._root = root
        self._options = replace(
            main.options, paths=(), model_repository=(), load_model=(), model_control_mode="explicit"
        )
        self._traces = main.traces
        self._scratch = scratch
        self._over = over
        self._find = find
        self._table: dict[str, Hosted] = {}
        self.failed: dict[str, None] = {}
        """The targets whose model was found and failed to load, until it loads: in Triton the server is not ready."""

    def get(self, name: str) -> Hosted | None:
        """The model of that name, if it is loaded."""
        found = self._table.get(name)
        return found if found is not None and found.rest is not None else None

    def loaded(self) -> list[Hosted]:
        """All that are loaded, by name."""
        return [row for _, row in sorted(self._table.copy().items()) if row.rest is not None]

    def served(self) -> list[ServedModel]:
        """What serves in all their engines."""
        return [model for row in self.loaded() if row.engine is not None for model in row.engine.models()]

    def add(self, name: str, url: str, target: str) -> Callable[[], None] | None:
        """Take a model into the table; returns the work that loads it, None when the name or its URL is there already.

        The work raises RemoraError when it cannot be loaded; the caller then calls `forget`. Raises
        InvalidArgumentError for a URL that is not below the root.
        """
        place = self._place(url)
        if name in self._table or any(row.url == url for row in self._table.copy().values()):
            return None
        row = self._table[name] = Hosted(name, url, target)
        return lambda: self._load(row, place)

    def forget(self, name: str) -> None:
        """Take out of the table what could not be loaded."""
        self._table.pop(name, None)

    def remove(self, name: str) -> Callable[[], None] | None:
        """End the service of a model; returns the work that gives its memory back, None when it is not loaded.

        The name stays taken until the work is done and `forget` is called.
        """
        row = self.get(name)
        if row is None:
            return None
        row.rest = None
        return lambda: _close(row, _UNLOAD_S)

    def close(self) -> None:
        """End all of them, when the server stops."""
        for row in self._table.copy().values():
            row.rest = None
            _close(row, _STOP_S)

    def _place(self, url: str) -> Path:
        """The folder that a URL names. Nothing on disk is looked at before its text is found to be in order."""
        root = str(self._root)
        parts = url[len(root) + 1 :].split("/") if url.startswith(f"{root}/") else []
        if len(parts) < 2 or parts[1] != "model" or not all(_PART.fullmatch(part) for part in parts if part):
            raise self._elsewhere(url)
        try:
            place = Path(url).resolve()
        except (OSError, RuntimeError) as error:  # links that lead round in a circle
            raise InvalidArgumentError(f"the model's url '{url[:200]}' leads nowhere: {error}") from error
        if not place.is_relative_to(self._root.resolve() / parts[0]):
            raise self._elsewhere(url)
        return place

    def _elsewhere(self, url: str) -> InvalidArgumentError:
        # The text of Triton's newer releases; 2.51 looks in any folder.
        return InvalidArgumentError(
            f"Invalid \"url\" '{url[:200]}': expected a path of the form {self._root}/<hash>/model[/<subdir>]"
        )

    def _load(self, row: Hosted, place: Path) -> None:
        if not place.exists():
            raise InvalidArgumentError(f"failed to register '{row.url}', repository not found")
        # The name is the platform's and no path: what is generated for it lies under its digest.
        layout = self._find(place, self._scratch / sha256(row.name.encode("utf-8", "replace")).hexdigest())
        engine = Engine(options=replace(self._options, **layout.places), traces=self._traces)
        try:
            engine.start()
            inner = _entry(engine, layout)
            try:
                engine.load(inner)
            except RemoraError as error:
                self._note_failure(row.target)
                raise _renamed(error, inner, row.target) from error
        except BaseException:
            engine.stop(0.0)
            raise
        for model in engine.models():  # names inside one model may be those inside another
            model.metric_labels = (("target", row.target), ("hosted", row.name))
        self.failed.pop(row.target, None)
        row.engine, row.inner, row.script = engine, inner, layout.script
        row.rest = self._over(engine, row.target)
        _log.info("model %r (%r) is loaded from %r", row.name, row.target, row.url)

    def _note_failure(self, target: str) -> None:
        self.failed[target] = None
        if len(self.failed) > _MAX_FAILED:
            self.failed.pop(next(iter(self.failed), ""), None)


def _close(row: Hosted, timeout_s: float) -> None:
    engine, row.engine = row.engine, None
    if engine is not None:
        engine.stop(timeout_s)
        give_back()
        _log.info("model %r (%r) is unloaded", row.name, row.target)


def _entry(engine: Engine, layout: Layout) -> str:
    """The model that answers invocations: the only one, or the ensemble among them [N05]."""
    if layout.default:
        return layout.default
    names = layout.models or [entry.name for entry in engine.perform(RepositoryIndex())]
    ensembles = [name for name in names if _is_ensemble(layout, name)] if len(names) > 1 else names
    if len(ensembles) != 1:
        what = f"{len(names)} models and {len(ensembles)} ensembles" if names else "no model"
        raise InvalidArgumentError(
            f"the model's folder holds {what}: one model, or one ensemble and its steps, is served"
        )
    return ensembles[0]


def _is_ensemble(layout: Layout, name: str) -> bool:
    for repository in layout.places.get("paths", ()):
        try:
            path = find_config(repository / name)
            if path is not None and read_config(path).platform == "ensemble":
                return True
        except ConfigError:  # whoever loads it says what is wrong
            continue
    return False


def _renamed(error: RemoraError, inner: str, target: str) -> RemoraError:
    """The error in the words of a client that knows the model by its target name."""
    return type(error)(error.message.replace(f"'{inner}'", f"'{target}'"))
