"""Which backend serves a model, when its configuration does not say; the law: file names decide, as in Triton (C04).

Only names are looked at: what is in the files is the backend's business.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig

ENSEMBLE = "ensemble"
"""The platform of models that only join others (spec E01)."""


class _Kind(NamedTuple):
    """What a model file says about the model: its backend, and the platform that goes with it, if any."""

    filename: str
    backend: str
    platform: str = ""
    aliases: tuple[str, ...] = ()
    only_if_there: bool = False
    """The backend has files of several names: none is meant before it is there."""
    by_itself: bool = True
    """The name is telling enough without a backend in the configuration."""


_KINDS = (
    # In Triton's order: the first file that is there wins.
    _Kind("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    _Kind("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    _Kind("model.plan", "tensorrt", "tensorrt_plan"),
    _Kind("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    _Kind("model.xml", "openvino"),
    _Kind("model.pt", "pytorch", "pytorch_libtorch", ("libtorch",)),
    _Kind("model.pt2", "pytorch", "torch_aoti"),
    _Kind("model.py", "python"),
    # Ours: Triton asks for the backend's name in the configuration.
    _Kind("model.so", "native"),
    _Kind("xgboost.ubj", "fil", only_if_there=True),
    _Kind("xgboost.json", "fil", only_if_there=True),
    _Kind("checkpoint.tl", "fil", only_if_there=True),
    _Kind("model.txt", "fil", only_if_there=True, by_itself=False),
)

MODEL_FILENAMES = tuple(kind.filename for kind in _KINDS if kind.by_itself)
"""The names that tell a model's backend by themselves."""

PLATFORMS = {platform: kind.backend for kind in _KINDS for platform in (kind.platform, *kind.aliases) if platform}
"""The platforms that Triton knows, and the backend of each (spec C03)."""


def infer_backend(config: ModelConfig, name: str, filenames: Collection[str]) -> None:
    """Fill ``backend``, ``platform`` and ``default_model_filename`` as far as they follow from what is there.

    Args:
        config: changed in place; what it says already is kept. Ensembles stay as they are.
        name: the model's name; ``x.identity`` asks for the backend ``identity``.
        filenames: what lies in the version's directory, names only.

    Raises:
        ConfigError: when nothing tells the backend; the text names the files that were looked for.
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


def _kind_of(config: ModelConfig, filenames: Collection[str]) -> _Kind | None:
    """The row that fits best: by platform, by the file name that is given, by the files there, by backend alone."""
    kinds = [kind for kind in _KINDS if config.backend == kind.backend or (not config.backend and kind.by_itself)]
    for kind in kinds:
        if config.platform:
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
