"""remora: one inference engine that rides on any cloud.

>>> import remora
>>> with remora.Engine("models") as engine:                   # doctest: +SKIP
...     engine.infer("digits", {"image": pixels})

Only names are imported here; numpy and the engine come with the first use of `Engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remora._version import __version__

if TYPE_CHECKING:
    from remora.cli.script import serve
    from remora.engine import Engine, InferResult
    from remora.errors import RemoraError
    from remora.functions import Array, BadRequestError, Model, ModelDefinitionError, Pipeline, model
    from remora.options import EngineOptions
    from remora.server.http.asgi import create_app

_HOMES = {
    **dict.fromkeys(
        ("Array", "BadRequestError", "Model", "ModelDefinitionError", "Pipeline", "model"), "remora.functions"
    ),
    "create_app": "remora.server.http.asgi",
    "serve": "remora.cli.script",
    "Engine": "remora.engine",
    "InferResult": "remora.engine",
    "EngineOptions": "remora.options",
    "RemoraError": "remora.errors",
}

__all__ = [
    "Array",
    "BadRequestError",
    "Engine",
    "EngineOptions",
    "InferResult",
    "Model",
    "ModelDefinitionError",
    "Pipeline",
    "RemoraError",
    "__version__",
    "create_app",
    "model",
    "serve",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'remora' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(home), name)
