"""Models as ONNX Runtime has optimised them, kept on disk; the law: a file there is whole, and only used where it fits.

Optimising a large graph takes seconds at every start. What comes out depends on the model, the version and options of
ONNX Runtime and the processor, so all of these make up the file's name. Such a file is loaded with the optimisations
switched off, without which there would be no gain.
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

# How a protobuf says {key: "location"}: weights in files of their own, whose content the model's hash would miss.
_EXTERNAL_DATA = b"\n\x08location\x12"
_MOST_BYTES = 1 << 30
"""Larger models are left alone: protobuf ends at 2 GiB, and reading them again costs more than it saves."""


class OptimizedModels:
    """A directory of optimised models. Processes may share it.

    Args:
        folder: made when it is not there.
        flavour: all that the result depends on besides the model and the processor.
    """

    def __init__(self, folder: Path, flavour: str) -> None:
        self._folder = folder
        self._flavour = flavour

    def load(self, model: Path, optimize: Callable[..., Any], reload: Callable[[Path], Any]) -> Any:
        """A session for ``model``.

        Args:
            model: the file as it was exported.
            optimize: ``optimize(model)`` makes a session; with ``optimized_model_filepath`` it writes its graph there.
            reload: makes a session of such a file.
        """
        name = self._name_of(model)
        if name is None:
            return optimize(model)
        kept = self._folder / name
        if kept.is_file():
            try:
                return reload(kept)
            except Exception as error:  # damaged, or not ours: made anew below
                _log.warning("the optimised model %s cannot be loaded and is made anew: %s", kept, error)
        return self._optimize_and_keep(model, kept, optimize)

    def _optimize_and_keep(self, model: Path, kept: Path, optimize: Callable[..., Any]) -> Any:
        unfinished = kept.with_name(f"{os.getpid()}-{threading.get_ident()}-{kept.name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Level 3 keeps the warning to itself that such a file fits one kind of machine: the name sees to that.
            session = optimize(model, optimized_model_filepath=str(unfinished), log_severity_level=3)
            unfinished.replace(kept)
        except Exception as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            _log.warning("the optimised form of %s cannot be kept in %s: %s", model.name, self._folder, error)
            return optimize(model)  # raises as it would without a cache, if the model is to blame
        return session

    def _name_of(self, model: Path) -> str | None:
        """The file's name; None for a model that cannot be kept."""
        if model.stat().st_size > _MOST_BYTES:
            return None
        data = model.read_bytes()
        if _EXTERNAL_DATA in data:
            return None
        digest = hashlib.sha256(data)
        digest.update(f"\0{self._flavour}\0{cpu_signature()}".encode())
        return f"{digest.hexdigest()}.onnx"
