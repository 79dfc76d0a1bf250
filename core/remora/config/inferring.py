"""Inference of a model's backend from its configuration and file names, as in Triton [C04].

Only file names are used; their content is left to the backend.
"""

from __future__ import annotations

from collections.abc import Collection

from remora.errors import ConfigError
from remora.model_files import KINDS, MODEL_FILENAMES, FileKind
from remora.proto.model_config_pb2 import ModelConfig

ENSEMBLE = "ensemble"
"""The platform of models that only connect others [E01]."""


PLATFORMS = {platform: kind.backend for kind in KINDS for platform in (kind.platform, *kind.aliases) if platform}
"""Triton's platforms and the backend of each [C03]."""

SINGULAR = frozenset(PLATFORMS.values())
"""The backends that accept only their own platforms; for others the platform is free text."""


def infer_backend(config: ModelConfig, name: str, filenames: Collection[str]) -> None:
    """Fill in ``backend``, ``platform`` and ``default_model_filename``.

    What cannot be inferred stays empty.

    Args:
        config: changed in place; existing values are kept. Ensembles are left alone.
        name: the model's name; ``x.identity`` selects the backend ``identity``.
        filenames: the file names in the version's directory.

    Raises:
        ConfigError: no backend can be inferred; the text names the expected files.
    """
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        return
    kind = _kind_of(config, filenames)
    if kind is None:
        if not (config.backend or config.platform or config.default_model_filename):
            _name_custom_backend(config, name, filenames)
        return
    config.backend = config.backend or kind.backend
    config.platform = config.platform or kind.platform
    config.default_model_filename = config.default_model_filename or kind.filename


def _kind_of(config: ModelConfig, filenames: Collection[str]) -> FileKind | None:
    """Return the best match.

    The order is: by platform, by the configured file name, by the files, by backend alone. A platform that Triton does
    not know is free text for a backend without one (python), which the configured file name selects.
    """
    kinds = [kind for kind in KINDS if config.backend == kind.backend or (not config.backend and kind.by_itself)]
    for kind in kinds:
        free_text = not kind.platform and config.platform not in PLATFORMS
        if config.platform and not (free_text and config.default_model_filename):
            fits = config.platform in (kind.platform, *kind.aliases)
        elif config.default_model_filename:
            fits = config.default_model_filename == kind.filename
        else:
            fits = kind.filename in filenames
        if fits:
            return kind
    return kinds[0] if config.backend and kinds and not kinds[0].only_if_there else None


def _name_custom_backend(config: ModelConfig, name: str, filenames: Collection[str]) -> None:
    _, _, backend = name.partition(".")
    if not backend:
        found = ", ".join(sorted(filenames)[:10]) or "nothing"
        raise ConfigError(
            f"Invalid model name: Could not determine backend for model '{name}' with no backend in model "
            f"configuration. Expected model name of the form 'model.<backend_name>'. Looked in its version directory "
            f"for {', '.join(MODEL_FILENAMES)}; found {found}"
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"
