"""Scoring script of an Azure ML batch deployment: each file of a mini-batch is one answer.

Name a copy of this file as the deployment's ``scoring_script``. A file is a V2 request (``.json``), or the rows of a
model with one input: an array (``.npy``) or numbers (``.csv``). A mini-batch of a tabular data asset is a table, and
each of its rows one answer. ``REMORA_DEFAULT_MODEL`` selects one of several models.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from remora.engine import Engine, InferResult
from remora.errors import RemoraError
from remora.options import EngineOptions
from remora.system.json_text import read_json
from remora_adapters.azureml import find_models

_log = logging.getLogger("remora.azureml")

_engine: list[Engine] = []
_Pending = list[Future[InferResult]]


def init() -> None:
    """Load the models of the deployment. A job calls this once in each worker process."""
    mounted = Path(os.environ["AZUREML_MODEL_DIR"])
    _engine[:] = [Engine(find_models(mounted), options=EngineOptions(model_name=mounted.parent.name)).start()]


def run(mini_batch: Any) -> list[str]:
    """Return one JSON text for each file or row that was answered.

    A failed one is logged and left out, which Azure counts against the job's ``error_threshold``. All requests are
    submitted before the first answer is awaited, so that they fill the model's batches.
    """
    if hasattr(mini_batch, "to_numpy"):
        return _run_table(mini_batch.to_numpy())
    pending = [(Path(path), _submitted(Path(path))) for path in mini_batch]
    answers = []
    for path, parts in pending:
        outputs = _outputs(path.name, parts)
        if outputs is not None:
            answers.append(json.dumps({"file": path.name, "outputs": outputs}))
    return answers


def _run_table(rows: np.ndarray[Any, Any]) -> list[str]:
    outputs = _outputs("a table", _submit_rows(np.asarray(rows.tolist())))
    if outputs is None:
        return []
    return [json.dumps({name: values[at] for name, values in outputs.items()}) for at in range(len(rows))]


def _submitted(path: Path) -> _Pending | Exception:
    """Submit the requests of a file, or return why they cannot be read."""
    try:
        if path.suffix == ".json":
            return _submit(_inputs_of(read_json(path.read_bytes())))
        if path.suffix == ".npy":
            return _submit_rows(np.load(path, allow_pickle=False))
        if path.suffix == ".csv":
            return _submit_rows(np.loadtxt(path, delimiter=",", ndmin=2))
        raise ValueError("expected a V2 request (.json) or the rows of an input (.npy, .csv)")
    except (OSError, ValueError, LookupError, TypeError, RemoraError) as error:
        return error


def _inputs_of(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of a V2 request with JSON data. Raises KeyError, TypeError, ValueError."""
    return {
        each["name"]: np.array(each["data"], object if each["datatype"] == "BYTES" else None).reshape(each["shape"])
        for each in request["inputs"]
    }


def _submit_rows(rows: np.ndarray[Any, Any]) -> _Pending:
    """Submit rows of the model's only input in batches. Raises ValueError, RemoraError."""
    signature = _engine[0].resolve(_model()).signature
    if len(signature.inputs) != 1:
        raise ValueError(f"the model {_model()} has {len(signature.inputs)} inputs: send a V2 request (.json)")
    (spec,) = signature.inputs
    step = signature.max_batch_size or len(rows)
    return [future for part in _parts(rows, step) for future in _submit({spec.name: part})]


def _parts(rows: np.ndarray[Any, Any], step: int) -> Iterator[np.ndarray[Any, Any]]:
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step]


def _submit(inputs: Mapping[str, np.ndarray[Any, Any]]) -> _Pending:
    return [_engine[0].infer_async(_model(), inputs)]


def _model() -> str:
    return os.environ.get("REMORA_DEFAULT_MODEL") or _engine[0].only_model()


def _outputs(name: str, parts: _Pending | Exception) -> dict[str, list[Any]] | None:
    """Return the outputs of a file as lists, or log the failure and return None."""
    try:
        if isinstance(parts, Exception):
            raise parts
        results = [part.result() for part in parts]
        return {key: _listed([result[key] for result in results]) for key in results[0]}
    except Exception as error:
        _log.error("%s: %s: %s", name, type(error).__name__, error)
        return None


def _listed(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays as one list of rows, with bytes as text."""
    found: list[Any] = np.concatenate([np.asarray(each) for each in arrays]).tolist()
    return [_text(each) for each in found]


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(each) for each in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
