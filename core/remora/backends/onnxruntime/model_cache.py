"""Cache on disk of models that ONNX Runtime has optimised.

Optimising a large graph takes seconds at every start. The result depends on the model, the version and options of ONNX
Runtime and the processor, so all of these determine the file's name. A cached file is loaded with optimisation
disabled. Invariant: a file in the cache is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remora.system.cpus import cpu_signature

_log = logging.getLogger(__name__)

# Protobuf of {key: "location"}: weights in separate files, which the model's hash would not cover.
_EXTERNAL_DATA = b"\n\x08location\x12"
_MOST_BYTES = 1 << 30
"""Largest cached model. Protobuf messages end at 2 GiB, and reading larger ones costs more than it saves."""


class OptimizedModels:
    """Directory of optimised models, which processes may share.

    Args:
        folder: created if missing.
        flavour: all that the result depends on besides the model and the processor.
    """

    def __init__(self, folder: Path, flavour: str) -> None:
        self._folder = folder
        self._flavour = flavour

    def load(self, model: Path, optimize: Callable[..., Any], reload: Callable[[Path], Any]) -> Any:
        """Return a session for ``model``.

        Args:
            model: the exported file.
            optimize: ``optimize(model)`` makes a session; with ``optimized_model_filepath`` it also writes its graph
                there.
            reload: makes a session of such a file.
        """
        name = self._name_of(model)
        if name is None:
            return optimize(model)
        kept = self._folder / name
        if kept.is_file():
            try:
                return reload(kept)
            except Exception as error:  # a damaged or foreign file is replaced below
                _log.warning("the optimised model %s cannot be loaded and is rebuilt: %s", kept, error)
        return self._optimize_and_keep(model, kept, optimize)

    def _optimize_and_keep(self, model: Path, kept: Path, optimize: Callable[..., Any]) -> Any:
        unfinished = kept.with_name(f"{os.getpid()}-{threading.get_ident()}-{kept.name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Level 3 suppresses the warning that such a file fits only one kind of machine, which the name covers.
            session = optimize(model, optimized_model_filepath=str(unfinished), log_severity_level=3)
            unfinished.replace(kept)
        except Exception as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            _log.warning("the optimised form of %s cannot be kept in %s: %s", model.name, self._folder, error)
            return optimize(model)  # raises the model's own error, if the model causes it
        return session

    def _name_of(self, model: Path) -> str | None:
        """Return the file's name, or None for a model that cannot be cached."""
        if model.stat().st_size > _MOST_BYTES:
            return None
        data = model.read_bytes()
        if _EXTERNAL_DATA in data:
            return None
        digest = hashlib.sha256(data)
        digest.update(f"\0{self._flavour}\0{cpu_signature()}".encode())
        return f"{digest.hexdigest()}.onnx"
