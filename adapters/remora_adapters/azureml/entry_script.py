"""Azure ML scoring script, with ``init()`` called once and ``run()`` for each request.

Invariant: the script and its clients see what azureml-inference-server-http shows, with one ``run`` at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from remora.system.json_text import read_json
from remora_adapters.azureml import raw_http
from remora_adapters.azureml.answers import FAILED, AzureAnswer, message_answer
from remora_adapters.azureml.raw_http import AMLRequest, AMLResponse
from remora_adapters.azureml.swagger import ANYTHING, schemas_of

_log = logging.getLogger("remora.azureml")

EXEC_MS = "x-ms-run-fn-exec-ms"
"""Header with the duration of ``run`` in milliseconds."""
_FAILURE = "An unexpected error occurred in scoring script. Check the logs for more info."
_INTERNAL = "An unexpected internal error occurred. Check the logs for more info."
_CANCELLED = "The client disconnected before this request was started."


class ScriptError(Exception):
    """Error that makes the script unusable, with a text for the operator."""


class BadInputError(Exception):
    """Request that cannot be converted to arguments of the script."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def answer_of(response: Any) -> AzureAnswer:
    """Convert an AMLResponse, or a script's Flask response, to plain data."""
    return AzureAnswer(
        int(response.status_code), [(str(k), str(v)) for k, v in response.headers.items()], response.get_data()
    )


class EntryScript:
    """Loaded script with its state.

    Args:
        path: the file; None for a module ``main`` on the path.
        search: directories that the script may import from.
        at_a_time: maximum of concurrent ``run`` calls.
        clock_s: seconds, to measure ``run``.
    """

    def __init__(
        self,
        path: Path | None,
        search: tuple[Path, ...] = (),
        *,
        at_a_time: int = 1,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._path = path
        self._search = search
        self._turns = threading.BoundedSemaphore(at_a_time)
        self._clock_s = clock_s
        self._run: Callable[..., Any] | None = None
        self._read: Callable[[AMLRequest], dict[str, Any]] = lambda request: {}
        self._wants_headers = False
        self.schemas = ANYTHING
        """Schemas that the script declares for input and output."""
        self.trouble = "the scoring script is being loaded"
        """Reason why the script cannot score now, or empty."""

    def open(self) -> None:
        """Import the script and call its ``init``. Never raises; an error sets ``trouble``."""
        try:
            raw_http.register_modules()
            self._open(self._import())
            self.trouble = ""
        except ScriptError as error:
            self.trouble = str(error)
            _log.error("%s", error)
        except BaseException as error:  # because sys.exit in a script must not end the server
            self.trouble = f"the scoring script failed to start: {type(error).__name__}: {error}"
            _log.exception("the scoring script failed to start")

    def _import(self) -> ModuleType:
        for folder in self._search:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
        if self._path is None:
            return importlib.import_module("main")
        spec = importlib.util.spec_from_file_location("entry_module", self._path)
        if spec is None or spec.loader is None or not self._path.is_file():
            raise ScriptError(f"there is no scoring script at {self._path}: set AZUREML_ENTRY_SCRIPT")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _open(self, module: ModuleType) -> None:
        for name in ("init", "run"):
            if not callable(getattr(module, name, None)):
                raise ScriptError(f"the scoring script {module.__file__} does not define {name}()")
        # Some of Azure's tools wrap a script in a driver, whose run only forwards.
        driven = getattr(module, "driver_module", None)
        run = driven.run if isinstance(driven, ModuleType) and hasattr(driven, "run") else module.run
        schema_util = _decorated(run)
        self._read, self._wants_headers = _reader_of(run, decorated=schema_util is not None)
        if schema_util is not None:
            self.schemas = schemas_of(run, schema_util)
        self._run = run
        module.init()

    def score(self, request: AMLRequest, wanted: Callable[[], bool] = lambda: True) -> AzureAnswer:
        """Return the answer to a request after waiting for a free slot. Never raises.

        ``wanted`` returns False if the client has disconnected by then, and ``run`` is skipped.
        """
        if self._run is None or self.trouble:
            return message_answer(503, self.trouble)
        try:
            arguments = self._read(request)
        except BadInputError as error:
            return message_answer(error.status, str(error))
        if self._wants_headers:
            arguments["request_headers"] = dict(request.headers.items())
        with self._turns:
            return self._scored(self._run, arguments) if wanted() else message_answer(400, _CANCELLED)

    def _scored(self, run: Callable[..., Any], arguments: dict[str, Any]) -> AzureAnswer:
        begin = self._clock_s()
        try:
            output = run(**arguments)
        except (Exception, SystemExit):
            _log.exception("run() of the scoring script failed")
            return message_answer(500, _FAILURE, failed=True)
        took_ms = (self._clock_s() - begin) * 1e3
        try:
            if hasattr(output, "status_code") and hasattr(output, "get_data"):
                if output.status_code >= 500:
                    output.headers[FAILED] = "True"
            else:
                output = AMLResponse(output, 200, json_str=True)
            answer = answer_of(output)
        except Exception:
            _log.exception("the return value of run() cannot be sent")
            return message_answer(500, _INTERNAL)
        return AzureAnswer(answer.status, [*answer.headers, (EXEC_MS, f"{took_ms:.3f}")], answer.body)


def _decorated(run: Callable[..., Any]) -> ModuleType | None:
    """Return the module inference_schema.schema_util if it decorates ``run``, or None."""
    schema_util = sys.modules.get("inference_schema.schema_util")
    return schema_util if schema_util is not None and schema_util.is_schema_decorated(run) else None


def _reader_of(run: Callable[..., Any], *, decorated: bool) -> tuple[Callable[[AMLRequest], dict[str, Any]], bool]:
    """Return the converter of a request to arguments, and True if ``run`` takes headers.

    Raises ScriptError.
    """
    parameters = list(inspect.signature(run).parameters.values())
    usual = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(parameter.kind not in usual for parameter in parameters):
        raise ScriptError("run() cannot accept positional-only arguments, *args, or **kwargs.")
    wants_headers = any(parameter.name == "request_headers" for parameter in parameters)
    inputs = [parameter for parameter in parameters if parameter.name != "request_headers"]
    if not inputs:
        raise ScriptError("run() needs to accept an argument for input data.")
    if raw_http.is_raw(run) and decorated:
        raise ScriptError("run() cannot be decorated with both @rawhttp and @input_schema")
    name = inputs[0].name
    if raw_http.is_raw(run):
        return lambda request: {name: request}, wants_headers
    if decorated:
        return lambda request: _named(request, inputs), wants_headers
    return lambda request: {name: _as_text(request)}, wants_headers


def _as_text(request: AMLRequest) -> str:
    if request.method == "GET":
        return json.dumps(_query(request))
    _only_post(request)
    try:
        return request.data.decode()
    except UnicodeDecodeError as error:
        raise BadInputError(400, f"Input cannot be decoded as UTF-8: {error}") from None


def _named(request: AMLRequest, inputs: list[inspect.Parameter]) -> dict[str, Any]:
    """Return the values of a JSON object by parameter name, for a ``run`` with a schema."""
    body = _query(request) if request.method == "GET" else _json_object(request)
    found = {}
    for parameter in inputs:
        value = body.get(parameter.name, parameter.default)
        if value is inspect.Parameter.empty:
            raise BadInputError(400, f"A value is not provided for the {parameter.name!r} parameter.")
        found[parameter.name] = value
    return found


def _json_object(request: AMLRequest) -> dict[str, Any]:
    _only_post(request)
    if not request.is_json:
        raise BadInputError(415, "Expects Content-Type to be application/json")
    try:
        body = read_json(request.data)
    except ValueError as error:
        if not request.data:
            raise BadInputError(400, "POST body is empty. Expecting a JSON dictionary.") from None
        raise BadInputError(400, f"POST body could not be decoded as JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadInputError(400, "POST body should be a JSON dictionary.")
    return body


def _only_post(request: AMLRequest) -> None:
    if request.method != "POST":
        raise BadInputError(405, "Method not allowed")


def _query(request: AMLRequest) -> dict[str, Any]:
    """Return the query's parameters, parsed as JSON where possible."""
    found = {}
    for key in request.args:
        values: list[Any] = []
        for text in request.args.getlist(key):
            value = text
            with suppress(ValueError):
                value = read_json(text)
            values.append(value)
        found[key] = values[0] if len(values) == 1 else values
    return found
