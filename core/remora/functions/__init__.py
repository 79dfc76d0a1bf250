"""Python functions and classes as models.

>>> import remora
>>> @remora.model
... def double(x: float) -> float:
...     return 2 * x
>>> double(1.5)
3.0

A decorated function stays a function. `remora serve app.py` serves all models of a file: it writes them as an ordinary
model repository (`remora.repository.exporting`) whose models run in the Python backend (`remora.functions.runtime`).

Invariant: the modules that run a model import numpy and the standard library only, so that an exported repository also
runs in a Triton without remora.
"""

from __future__ import annotations

from remora.functions.definition import Model, ModelDefinitionError, Pipeline, model
from remora.functions.errors import BadRequestError
from remora.functions.hints import Array

__all__ = ["Array", "BadRequestError", "Model", "ModelDefinitionError", "Pipeline", "model"]
