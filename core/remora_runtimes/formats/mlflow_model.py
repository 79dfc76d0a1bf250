"""MLflow models (``MLmodel``), run by MLflow's own loader of all flavors.

The model's signature gives inputs and outputs. Columns become one input each; a tensor without a name is ``input``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remora.api.functions import BadRequestError, InputField, Kind, Model, OutputField, Signature, kind_of
from remora_runtimes.formats import ROWS, needed, rows_of

_COLUMNS: Mapping[str, Any] = {
    "boolean": np.bool_,
    "integer": np.int32,
    "long": np.int64,
    "float": np.float32,
    "double": np.float64,
    "string": list[str],
    "binary": list[bytes],
}


def define(folder: Path, name: str, trusted: bool) -> Model:
    """Describe an MLflow model by its signature.

    Raises ValueError if it has none, or a type that no tensor can hold.
    """
    if not trusted:
        raise ValueError(f"'{folder}' contains pickles: reading them runs code; start the server with --trust-pickle")
    loaded = needed("mlflow.pyfunc", folder).load_model(str(folder))
    found = loaded.metadata.signature
    if found is None or found.inputs is None:
        raise ValueError(
            f"the MLflow model '{folder}' has no signature: log it with signature=mlflow.models.infer_signature(x, y)"
        )
    inputs = tuple(InputField(each, kind, not _required(spec)) for each, kind, spec in _fields(found.inputs, "input"))
    outputs = (
        tuple(OutputField(each, kind) for each, kind, _ in _fields(found.outputs, "output")) if found.outputs else ()
    )
    outputs = outputs or (OutputField("output", kind_of(list, batched=True)),)
    prepare = _preparation(found.inputs, folder)

    def answer(**given: Any) -> tuple[Any, ...]:
        try:
            result = loaded.predict(prepare(given))
        except (ValueError, TypeError) as error:
            raise BadRequestError(str(error)) from None
        return _results(result, outputs)

    return Model(answer, name, ROWS, signature=Signature(inputs, outputs, lambda result: result, False))


def _fields(schema: Any, only: str) -> list[tuple[str, Kind, Any]]:
    """Return name, kind and specification of each column or tensor. Raises ValueError."""
    found = []
    for index, spec in enumerate(schema.inputs):
        name = spec.name or (only if len(schema.inputs) == 1 else f"{only}{index}")
        found.append((str(name), _kind(spec, str(name)), spec))
    return found


def _kind(spec: Any, name: str) -> Kind:
    if hasattr(spec, "shape"):
        if spec.type.kind in "OUS":
            return kind_of(list[str], batched=True)
        return rows_of(spec.type, *(int(each) for each in spec.shape[1:]))
    hint = _COLUMNS.get(getattr(spec.type, "name", ""))
    if hint is None:
        raise ValueError(f"column '{name}' of the model's signature has the type {spec.type}, which no tensor can hold")
    return rows_of(hint) if isinstance(hint, type) else kind_of(hint, batched=True)


def _required(spec: Any) -> bool:
    return bool(getattr(spec, "required", True))


def _preparation(schema: Any, folder: Path) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that makes MLflow's input of the inputs' arrays and lists."""
    named = all(spec.name for spec in schema.inputs)
    if schema.is_tensor_spec():
        return dict if named else lambda given: next(iter(given.values()))
    pandas = needed("pandas", folder)
    if named:
        return lambda given: pandas.DataFrame(dict(given))
    return lambda given: pandas.DataFrame(dict(enumerate(given.values())))


def _results(result: Any, outputs: tuple[OutputField, ...]) -> tuple[Any, ...]:
    """Return the values of the outputs from any result of MLflow's models."""
    if hasattr(result, "columns"):
        if len(outputs) == len(result.columns):
            return tuple(_values(result.iloc[:, index], each) for index, each in enumerate(outputs))
        return (result.to_dict(orient="records"),)
    if isinstance(result, Mapping):
        return tuple(_values(result[each.name], each) for each in outputs)
    return (_values(result, outputs[0]),)


def _values(column: Any, output: OutputField) -> Any:
    array = np.asarray(column)
    if output.kind.is_json:
        return array.tolist()
    if output.kind.datatype == "BYTES":
        return [each if isinstance(each, bytes) else str(each) for each in array.reshape(-1)]
    wide = output.kind.dims != (1,)
    return array if wide or array.ndim == 1 else array.reshape(-1)
