"""Python models of Triton's API for files that other libraries wrote.

`remora.repository.files` recognises such a file and writes a model folder whose ``model.py`` has a subclass of
`FileModel`. Each other module of this package has a function ``define`` that describes one kind of file as a `Model`.

Invariant: a library is imported by the process that runs the model, never by the server.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from remora.api.functions import ANY, Array, FunctionModel, Kind, Model, Settings, kind_of, tensor_config
from remora.model_files import MODEL_FILE, TRUST_PICKLE

ROWS = Settings(batch=64)
"""Settings of models whose library predicts several rows at once."""

_PACKAGES = {"sklearn": "scikit-learn", "mlflow": "mlflow-skinny", "sentence_transformers": "sentence-transformers"}

Define = Callable[[Path, str, bool], Model]
"""Function that describes a file: takes its path, the model's name, and True if a pickle may be read."""


class FileModel(FunctionModel):
    """Model of one file. Subclasses set ``define``."""

    define: ClassVar[Define]
    _first: ClassVar[Model | None] = None

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Fill in the batch size, inputs and outputs of the file."""
        model = cls._first = cls._read(config.as_dict())
        config.set_max_batch_size(max(model.settings.batch, config.as_dict().get("max_batch_size", 0)))
        for field in model.signature.inputs:
            config.add_input(tensor_config(field))
        for result in model.signature.outputs:
            config.add_output(tensor_config(result))
        if model.settings.batch:
            config.set_dynamic_batching()
        return config

    def _defined(self, args: Mapping[str, str]) -> Model:
        import json

        kind = type(self)
        first, kind._first = kind._first, None  # its state belongs to one instance
        return first or kind._read(json.loads(args["model_config"]))

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> Model:
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        return cls.define(Path(parameters[MODEL_FILE]), config["name"], TRUST_PICKLE in parameters)


def rows_of(dtype: Any, *shape: int) -> Kind:
    """Return the kind of a batch of arrays, each of a shape; of single numbers without one."""
    return kind_of(Array.__class_getitem__((dtype, ANY, *shape)), batched=True)


def needed(module: str, file: Path) -> Any:
    """Import and return the module that reads a file.

    Raises RuntimeError with the install command if it is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != top:
            raise
        package = _PACKAGES.get(top, top)
        raise RuntimeError(
            f"'{file}' needs the package {package}: install it beside remora (pip install {package}), or put the file "
            f"into a folder with a requirements.txt that names {package}, and serve the folder with --trust-pickle"
        ) from None
