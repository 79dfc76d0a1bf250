"""Python model that runs an ``inference.py`` of SageMaker's toolkits unchanged.

    model_fn(model_dir[, context])                       the model; without it, `predict_fn` gets None
    transform_fn(model, data, content_type, accept[, context])   the whole request, instead of the three below
    input_fn(data, content_type[, context])              text for JSON, CSV and plain text, else bytes
    predict_fn(input, model[, context])
    output_fn(prediction, accept[, context])             a body, or a pair of body and content type

Without `input_fn` and `output_fn`, JSON, CSV and .npy are converted to numpy arrays and back.

Invariant: an exception of the script becomes a 4xx or 5xx answer and never ends the worker.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

from remora_adapters.sagemaker.arrays import (
    CSV,
    JSON,
    NPY,
    array_of_csv,
    array_of_json,
    array_of_npy,
    csv_of_arrays,
    npy_of_array,
)

_TEXT = (JSON, CSV, "application/jsonlines", "text/plain")
_OK, _BAD, _BAD_TYPE, _NOT_ACCEPTABLE, _FAILED = 200, 400, 415, 406, 500


class _Refused(Exception):  # noqa: N818 - an answer, not a failure
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class TritonPythonModel:
    """Instance of the script's model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Import the script and load its model. An exception keeps the model from becoming ready."""
        parameters = orjson.loads(args["model_config"])["parameters"]
        script = Path(parameters["script"]["string_value"])
        directory = parameters["model_directory"]["string_value"]
        module = _imported(script)
        self._transform = _function(module, "transform_fn", 4)
        self._input = _function(module, "input_fn", 2) or _default_input
        self._predict = _function(module, "predict_fn", 2)
        self._output = _function(module, "output_fn", 2) or _default_output
        if self._transform is None and self._predict is None:
            raise ValueError(f"{script.name} has neither predict_fn nor transform_fn")
        load = _function(module, "model_fn", 1)
        self._model = load(directory) if load is not None else None

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, with separate errors."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        body, content_type, accept = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]
            for name in ("body", "content_type", "accept")
        )
        try:
            answer, answer_type = self._run(body, content_type.decode("latin-1"), accept.decode("latin-1"))
            status = _OK
        except _Refused as refusal:
            answer, answer_type, status = orjson.dumps({"error": str(refusal)}), JSON, refusal.status
        except MemoryError as error:
            raise pb_utils.TritonModelException(f"MemoryError: {error}") from error
        except (Exception, SystemExit) as error:  # SystemExit in a script must not fail other requests
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            text = f"{type(error).__name__}: {error}"
            answer, answer_type, status = orjson.dumps({"error": text}), JSON, _FAILED
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("body", np.array([answer], object)),
                pb_utils.Tensor("content_type", np.array([answer_type.encode()], object)),
                pb_utils.Tensor("status", np.array([status], np.int32)),
            ]
        )

    def _run(self, body: bytes, content_type: str, accept: str) -> tuple[bytes, str]:
        try:
            data: str | bytes = body.decode("utf-8") if content_type in _TEXT else body
        except UnicodeDecodeError as error:
            raise _Refused(_BAD, f"the body is not {content_type} in UTF-8: {error}") from error
        if self._transform is not None:
            result = self._transform(self._model, data, content_type, accept)
        else:
            assert self._predict is not None
            prediction = self._predict(self._input(data, content_type), self._model)
            result = self._output(prediction, accept)
        answer_type = accept
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], str):
            result, answer_type = result
        return _octets(result), answer_type


def _octets(result: Any) -> bytes:
    if isinstance(result, str):
        return result.encode()
    if isinstance(result, (bytes, bytearray, memoryview)):
        return bytes(result)
    return orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY)


def _imported(script: Path) -> ModuleType:
    """Import the script with its folder on the module path."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location("inference", script)
    if spec is None or spec.loader is None:
        raise ValueError(f"{script.name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["inference"] = module
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str, plain: int) -> Callable[..., Any] | None:
    """Return a function of the script for ``plain`` arguments, with None as its context."""
    function = getattr(module, name, None)
    if function is None:
        return None
    takes = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    if len(takes) == plain + 1:
        return lambda *arguments: function(*arguments, None)
    found: Callable[..., Any] = function
    return found


def _default_input(data: str | bytes, content_type: str) -> Any:
    try:
        if content_type == JSON:
            return array_of_json(data)
        if content_type == CSV:
            return array_of_csv(data.encode() if isinstance(data, str) else data)
        if content_type == NPY:
            return array_of_npy(data.encode() if isinstance(data, str) else data)
    except ValueError as error:
        raise _Refused(_BAD, f"the body is not {content_type}: {error}") from error
    raise _Refused(_BAD_TYPE, f"content type {content_type} is not supported: the script has no input_fn for it")


def _default_output(prediction: Any, accept: str) -> tuple[bytes, str]:
    if accept == JSON:
        listed = prediction.tolist() if isinstance(prediction, np.ndarray) else prediction
        return orjson.dumps(listed, option=orjson.OPT_SERIALIZE_NUMPY), JSON
    if accept == CSV:
        return csv_of_arrays([np.asarray(prediction)]), CSV
    if accept == NPY:
        return npy_of_array(np.asarray(prediction)), NPY
    raise _Refused(_NOT_ACCEPTABLE, f"{accept} is not supported: the script has no output_fn for it")
