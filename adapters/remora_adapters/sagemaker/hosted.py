"""Table of the models of a multi-model endpoint, with a dedicated engine for each.

The platform gives a model an opaque name and the URL of its unpacked folder. With an engine per model, names inside one
model cannot collide with another's, an ensemble is loaded and unloaded with its steps, and DELETE can wait until the
memory is free. The table belongs to the event loop except for `forget`, which other threads call, so it is read from
copies.

Invariant: a URL never leads outside the root.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from remora.api.http import RestService
from remora.api.system import give_back
from remora.calls import RepositoryIndex
from remora.config import find_config, read_config
from remora.engine import Engine
from remora.errors import ConfigError, InvalidArgumentError, RemoraError
from remora.models.served_model import ServedModel
from remora_adapters.sagemaker.layout import Layout, find_models

_log = logging.getLogger("remora.sagemaker")

_UNLOAD_S = 350.0
"""Less than the platform's timeout of 360 s for a DELETE."""
_STOP_S = 2.0
_MAX_FAILED = 1024
_PART = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._\-]*")


@dataclass(slots=True)
class Hosted:
    """Model of the endpoint.

    ``rest`` serves it under its folder's name ``inner``; it is absent (None) while the model is loaded or closed.
    ``target`` is the client's name for the model; ``script`` is True for an ``inference.py``.
    """

    name: str
    url: str
    target: str
    inner: str = ""
    script: bool = False
    engine: Engine | None = None
    rest: RestService | None = None


class HostedModels:
    """Table of models.

    `add` and `remove` run in the event loop; the work that they return runs in other threads.

    Args:
        root: every model's URL is a folder below it, ``<root>/<id>/model[/...]``.
        main: the server's engine, whose options (except model locations) and traces the models' engines share.
        scratch: folder for generated files.
        over: returns the service of an engine, with the client's model name as second argument.
        find: returns the layout of a model's folder, with a folder for generated files.
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
            main.options,
            paths=(),
            model_repository=(),
            load_model=(),
            model_control_mode="explicit",
            metrics_export=(),  # the server's engine exports the metrics of all
        )
        self._traces = main.traces
        self._scratch = scratch
        self._over = over
        self._find = find
        self._table: dict[str, Hosted] = {}
        self.failed: dict[str, None] = {}
        """Targets whose last load failed, which makes the server not ready in Triton."""

    def get(self, name: str) -> Hosted | None:
        """Return the model of that name if it is loaded."""
        found = self._table.get(name)
        return found if found is not None and found.rest is not None else None

    def loaded(self) -> list[Hosted]:
        """Return all loaded models by name."""
        return [row for _, row in sorted(self._table.copy().items()) if row.rest is not None]

    def served(self) -> list[ServedModel]:
        """Return the served models of all engines."""
        return [model for row in self.loaded() if row.engine is not None for model in row.engine.models()]

    def add(self, name: str, url: str, target: str) -> Callable[[], None] | None:
        """Add a model and return the work that loads it, or None for a known name or URL.

        The work raises RemoraError on failure, after which the caller calls `forget`. Raises InvalidArgumentError for a
        URL outside the root, and for a known name with a folder that is missing, as Triton looks there first [N05].
        """
        place = self._place(url)
        if any(row.url == url for row in self._table.copy().values()):
            return None
        if name in self._table:
            if not place.is_dir():
                raise _not_found(url)
            return None
        row = self._table[name] = Hosted(name, url, target)
        return lambda: self._load(row, place)

    def forget(self, name: str) -> None:
        """Remove a model that failed to load or was unloaded."""
        self._table.pop(name, None)

    def remove(self, name: str) -> Callable[[], None] | None:
        """Stop serving a model and return the work that frees its memory, or None if not loaded.

        The name stays reserved until the caller calls `forget` after the work.
        """
        row = self.get(name)
        if row is None:
            return None
        row.rest = None
        return lambda: _close(row, _UNLOAD_S)

    def close(self) -> None:
        """Close all engines at shutdown."""
        for row in self._table.copy().values():
            row.rest = None
            _close(row, _STOP_S)

    def _place(self, url: str) -> Path:
        """Return the folder of a URL, whose text is checked before the disk is accessed."""
        root = str(self._root)
        parts = url[len(root) + 1 :].split("/") if url.startswith(f"{root}/") else []
        if len(parts) < 2 or parts[1] != "model" or not all(_PART.fullmatch(part) for part in parts if part):
            raise self._outside_root(url)
        try:
            place = Path(url).resolve()
        except (OSError, RuntimeError) as error:  # a cycle of links
            raise InvalidArgumentError(f"the model's url '{url[:200]}' cannot be resolved: {error}") from error
        if not place.is_relative_to(self._root.resolve() / parts[0]):
            raise self._outside_root(url)
        return place

    def _outside_root(self, url: str) -> InvalidArgumentError:
        # The text of newer Triton releases; 2.51 accepts any folder.
        return InvalidArgumentError(
            f"Invalid \"url\" '{url[:200]}': expected a path of the form {self._root}/<hash>/model[/<subdir>]"
        )

    def _load(self, row: Hosted, place: Path) -> None:
        if not place.exists():
            raise _not_found(row.url)
        # Generated files are under the name's digest, because the name is not a path.
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
        for model in engine.models():  # because models of two folders may have equal names
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
    """Return the model for invocations, which is the only one or the only ensemble [N05]."""
    if layout.default:
        return layout.default
    names = layout.models or [entry.name for entry in engine.perform(RepositoryIndex())]
    ensembles = [name for name in names if _is_ensemble(layout, name)] if len(names) > 1 else names
    if len(ensembles) != 1:
        what = f"{len(names)} models and {len(ensembles)} ensembles" if names else "no model"
        raise InvalidArgumentError(
            f"the model's folder holds {what}: expected one model, or one ensemble and its steps"
        )
    return ensembles[0]


def _is_ensemble(layout: Layout, name: str) -> bool:
    for repository in layout.places.get("paths", ()):
        try:
            path = find_config(repository / name)
            if path is not None and read_config(path).platform == "ensemble":
                return True
        except ConfigError:  # the load reports the error
            continue
    return False


def _renamed(error: RemoraError, inner: str, target: str) -> RemoraError:
    """Return the error with the client's name of the model."""
    return type(error)(error.message.replace(f"'{inner}'", f"'{target}'"))


def _not_found(url: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"failed to register '{url}', repository not found")
