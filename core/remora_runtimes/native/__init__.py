"""Native backend for shared libraries in C, C++ or any language that exports C functions.

The interface is ``remora_backend.h`` beside this file. A library is called without the GIL and runs in the server's
process, so its faults can crash the server.
"""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from remora.api.backends import concurrent_instances
from remora.backends import Instance, Placement, Source
from remora.backends.model_files import load_failure, model_path, require_file
from remora.backends.ragged import array_instance
from remora.config import parse_config
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig
from remora_runtimes.native.calls import NativeLibrary, NativeRun
from remora_runtimes.native.elf import why_incomplete

INCLUDE = Path(__file__).parent
"""Directory of ``remora_backend.h``, for a compiler's ``-I``."""


class NativeBackend:
    """Backend for ``model.so``, or for one library shared by all models that name the backend.

    Such a library is in ``--backend-directory``.
    """

    def __init__(self, name: str = "native", library: Path | None = None) -> None:
        self.name = name
        self._library = library

    def open(self, source: Source, config: ModelConfig) -> NativeModel:
        """Load the library.

        Raises:
            NotFoundError: there is no library.
            ConfigError: it was built for another version of the header, or lacks a required function.
            InternalError: it cannot be loaded; the text has the reason.
        """
        path = self._library or require_file(model_path(source, config, "model.so"), source, "*.so")
        reason = why_incomplete(path)
        if reason:
            raise load_failure(source, path, reason)
        try:
            library = NativeLibrary(path)
        except (OSError, ConfigError) as error:
            failure = load_failure(source, path, error)
            raise (ConfigError(str(failure)) if isinstance(error, ConfigError) else failure) from error
        return NativeModel(source, library)


class NativeModel:
    """Loaded library."""

    def __init__(self, source: Source, library: NativeLibrary) -> None:
        self._source = source
        self._library = library

    def complete(self, config: ModelConfig) -> None:
        """Fill in omitted fields of the configuration from ``remora_describe``.

        Raises ConfigError if its text is not a configuration.
        """
        text = self._library.describe()
        if text is None:
            return
        described = parse_config(text, path=f"remora_describe of '{self._source.name}'", syntax="json")
        for field, value in described.ListFields():
            if field.name in ("name", "backend", "platform"):
                continue
            if field.is_repeated:
                if not getattr(config, field.name):
                    getattr(config, field.name).MergeFrom(value)
            elif field.message_type is not None:
                if not config.HasField(field.name):
                    getattr(config, field.name).CopyFrom(value)
            elif not getattr(config, field.name):
                setattr(config, field.name, value)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance made by ``remora_create``.

        Raises RemoraError with the library's reason.
        """
        run = NativeRun(
            self._library,
            config,
            placement,
            version=self._source.version,
            directory=self._source.path if self._source.path.is_dir() else self._source.path.parent,
            text=json.dumps(MessageToDict(config, preserving_proto_field_name=True)),
            threads=max(1, self._source.cpus // concurrent_instances(config)),
        )
        # not quick, because the library's code may block
        return array_instance(placement.name, config, run, close=run.close)

    def close(self) -> None:
        """Unload the library."""
        self._library.close()


__all__ = ["INCLUDE", "NativeBackend", "NativeModel"]
