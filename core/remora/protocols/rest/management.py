"""Codecs of the V2 REST management requests, from bodies to Calls and results to answers.

They serve all routes but inference and generation [H04-H08, M08-M12, T01].
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any, cast

from remora.calls import (
    Call,
    Duration,
    IndexEntry,
    ModelConfig,
    ModelExplain,
    ModelInfo,
    ModelLoad,
    ModelMetadata,
    ModelReady,
    ModelRelease,
    ModelSequences,
    ModelStatistics,
    ModelStats,
    ModelUnload,
    RecentTraces,
    RepositoryIndex,
    ResponseStats,
    SequenceReport,
    ServerInfo,
    ServerLive,
    ServerMetadata,
    ServerReady,
    Startup,
    TensorInfo,
)
from remora.errors import InternalError, InvalidArgumentError, MalformedError, RemoraError, UnsupportedError
from remora.protocols.json import access
from remora.protocols.json.printer import quoted
from remora.protocols.rest.answer import JSON, PLAIN, HttpAnswer, failure
from remora.protocols.rest.routes import Route
from remora.startup import as_document
from remora.system.logs import LogSetting, LogSettings
from remora.tracing.settings import TraceSetting, TraceSettings

_SWITCHES = ("log_info", "log_warning", "log_error")
_NUMBERS = ("trace_rate", "trace_count", "log_frequency")


def read_log(body: bytes) -> LogSetting:
    """Return the changes in a body. ``null`` and unknown keys change nothing."""
    request = access.document(body)
    changes: dict[str, bool | int | str] = {}
    for name in LogSettings._fields:
        _, value = access.find(request, name)
        if value is None:
            continue
        if name == "log_file":
            return LogSetting({name: value})  # always refused, with any other changes
        if name in _SWITCHES and not isinstance(value, bool):
            raise MalformedError(access.NOT_BOOL)
        if name == "log_verbose_level" and not access.is_uint(value):
            raise MalformedError(access.NOT_UINT)
        if name == "log_format" and not isinstance(value, str):
            raise MalformedError(access.NOT_TEXT)
        changes[name] = value
    return LogSetting(changes)


def read_trace(model: str, body: bytes) -> TraceSetting:
    """Return the changes in a body. ``null`` removes a setting."""
    request = access.document(body)
    changes: dict[str, tuple[str, ...] | None] = {}
    present, _ = access.find(request, "trace_file")
    if present:
        return TraceSetting(model, {"trace_file": None})  # always refused, with any value and any other changes
    present, levels = access.find(request, "trace_level")
    if present:
        if levels is not None and not isinstance(levels, list):
            raise MalformedError(access.NOT_ARRAY)
        changes["trace_level"] = None if levels is None else tuple(_text(level) for level in levels)
    for name in _NUMBERS:
        present, value = access.find(request, name)
        if present:
            changes[name] = None if value is None else (_text(value),)
    return TraceSetting(model, changes)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedError(access.NOT_TEXT)
    return value


def print_settings(settings: LogSettings | TraceSettings) -> bytes:
    """Return all settings as a JSON object, in Triton's order."""
    fields = settings.shown() if isinstance(settings, TraceSettings) else settings._asdict()
    members = [b"%b:%b" % (quoted(name), _printed(value)) for name, value in fields.items()]
    return b"{%b}" % b",".join(members)


def _printed(value: bool | int | str | tuple[str, ...]) -> bytes:
    if isinstance(value, tuple):
        return b"[%b]" % b",".join(quoted(each) for each in value)
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return b"%d" % value if isinstance(value, int) else quoted(value)


_NOT_BASE64 = r"[^A-Za-z0-9+/]"


# -- Calls ----------------------------------------------------------------------------------------------------------


def decode_call(route: Route, body: bytes) -> Call:
    """Return the call for a management request. Raises RemoraError for its body."""
    return _CALLS[route.action](route, bytes(body))


def _index(route: Route, body: bytes) -> Call:
    ready = False
    if body:
        present, value = access.find(access.document(body), "ready")
        if present:
            if not isinstance(value, bool):
                raise MalformedError(access.NOT_BOOL)
            ready = value
    return RepositoryIndex(ready, route.repository)


def _load(route: Route, body: bytes) -> Call:
    _check_repository(route)
    parameters: dict[str, str | bytes] = {}
    present, values = access.find(access.document(body), "parameters") if body else (False, None)
    if present:
        if not isinstance(values, dict):
            raise MalformedError(access.NOT_OBJECT)
        for key, value in values.items():
            if not isinstance(value, str):
                raise MalformedError(access.NOT_TEXT)
            if key == "config":
                parameters[key] = value
            elif key.startswith("file:"):
                parameters[key] = _file(value)
            else:
                raise InternalError("unexpected error on creating Triton parameter")
    return ModelLoad(route.model, parameters)


def _file(text: str) -> bytes:
    """Return the bytes of a file sent as base64.

    Characters outside the alphabet are skipped, as Triton's decoder does [M11].
    """
    digits = re.sub(_NOT_BASE64, "", text)
    if len(digits) % 4 == 1:
        digits = digits[:-1]  # six bits do not make a byte
    return base64.b64decode(digits + "=" * (-len(digits) % 4))


def _release(route: Route, body: bytes) -> Call:
    """Return the call for a release, whose body is remora's own JSON."""
    if route.verb == "GET":
        return ModelRelease(route.model)
    try:
        document = access.document(body)
    except MalformedError as error:  # which is Triton's status 500
        raise InvalidArgumentError(f"release: {error.message}") from None
    action = document.pop("action", None) if isinstance(document, dict) else None
    if not isinstance(action, str) or not action:
        raise InvalidArgumentError('release: expected a JSON object with an "action", such as {"action": "promote"}')
    return ModelRelease(route.model, action, document)


def _unload(route: Route, body: bytes) -> Call:
    _check_repository(route)
    # Triton unloads even if it cannot parse the body, so clients may send any body or none.
    try:
        request = access.document(body) if body else None
    except RemoraError:
        request = None
    _, parameters = access.find(request, "parameters")
    present, value = access.find(parameters, "unload_dependents")
    return ModelUnload(route.model, present and value is True)


def _check_repository(route: Route) -> None:
    if route.repository:
        raise UnsupportedError("'repository_name' specification is not supported")


def _log_settings(route: Route, body: bytes) -> Call:
    return read_log(body) if route.verb == "POST" else LogSetting()


def _trace_settings(route: Route, body: bytes) -> Call:
    return read_trace(route.model, body) if route.verb == "POST" else TraceSetting(route.model)


_CALLS: dict[str, Callable[[Route, bytes], Call]] = {
    "live": lambda route, body: ServerLive(),
    "ready": lambda route, body: ServerReady(),
    "model_ready": lambda route, body: ModelReady(route.model, route.version),
    "server_metadata": lambda route, body: ServerMetadata(),
    "model_metadata": lambda route, body: ModelMetadata(route.model, route.version),
    "model_config": lambda route, body: ModelConfig(route.model, route.version),
    "model_stats": lambda route, body: ModelStatistics(route.model, route.version),
    "model_sequences": lambda route, body: ModelSequences(route.model, route.version),
    "all_stats": lambda route, body: ModelStatistics(),
    "model_explain": lambda route, body: ModelExplain(route.model, route.version, route.request),
    "startup": lambda route, body: Startup(),
    "recent_traces": lambda route, body: RecentTraces(),
    "index": _index,
    "load": _load,
    "unload": _unload,
    "release": _release,
    "trace": _trace_settings,
    "logging": _log_settings,
}


# -- Results --------------------------------------------------------------------------------------------------------


def encode_result(route: Route, result: object) -> HttpAnswer:
    """Return the answer to a successful call of `decode_call`.

    ``result`` has the type that `remora.calls` documents for the call.
    """
    if route.action in ("live", "ready"):
        return HttpAnswer(200 if result else 400, (PLAIN,), [])
    if route.action == "model_ready":
        return HttpAnswer(200, (PLAIN,), []) if result else failure(400, "Model version not ready", plain=True)
    if result is None:
        return HttpAnswer(200, (JSON,), [])
    return HttpAnswer(200, (JSON,), [_RESULTS[route.action](result)])


def _server(info: Any) -> bytes:
    server = cast(ServerInfo, info)
    return b'{"name":%b,"version":%b,"extensions":%b}' % (
        quoted(server.name),
        quoted(server.version),
        _list([quoted(extension) for extension in server.extensions]),
    )


def _metadata(info: Any) -> bytes:
    model = cast(ModelInfo, info)
    return b'{"name":%b,"versions":%b,"platform":%b,"inputs":%b,"outputs":%b}' % (
        quoted(model.name),
        _list([quoted(version) for version in model.versions]),
        quoted(model.platform),
        _list([_tensor(tensor) for tensor in model.inputs]),
        _list([_tensor(tensor) for tensor in model.outputs]),
    )


def _tensor(tensor: TensorInfo) -> bytes:
    shape = _list([b"%d" % dim for dim in tensor.shape])
    return b'{"name":%b,"datatype":%b,"shape":%b}' % (quoted(tensor.name), quoted(tensor.datatype), shape)


def _config(config: Any) -> bytes:
    # imported on first use, because inference does not need the printer of configurations
    from remora.config import to_json

    return to_json(config)


def _entries(result: Any) -> bytes:
    return _list([_entry(entry) for entry in cast(list[IndexEntry], result)])


def _entry(entry: IndexEntry) -> bytes:
    # Empty version, state and reason are omitted [M08].
    members = [b'"%b":%b' % (key.encode(), quoted(text)) for key, text in entry._asdict().items() if text]
    return b"{%b}" % b",".join(members)


def _statistics(result: Any) -> bytes:
    return b'{"model_stats":%b}' % _list([_model_statistics(stats) for stats in cast(list[ModelStats], result)])


def _model_statistics(stats: ModelStats) -> bytes:
    batches = [
        b'{"batch_size":%d,%b}'
        % (batch.batch_size, _durations(batch, ("compute_input", "compute_infer", "compute_output")))
        for batch in stats.batches
    ]
    phases = (
        ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    )  # fmt: skip
    return (
        b'{"name":%b,"version":%b,"last_inference":%d,"inference_count":%d,"execution_count":%d,'
        b'"inference_stats":{%b},"response_stats":{%b},"batch_stats":%b,"memory_usage":[]}'
    ) % (
        quoted(stats.name),
        quoted(stats.version),
        stats.last_inference_ms,
        stats.inference_count,
        stats.execution_count,
        _durations(stats, phases),
        b",".join(
            b"%b:{%b}" % (quoted(index), _durations(row, ResponseStats._fields))
            for index, row in stats.responses.items()
        ),
        _list(batches),
    )


def _startup(result: Any) -> bytes:
    """Return remora's startup page as JSON (docs/cold-start.md)."""
    import json  # imported on first use, because this page is rarely requested

    return json.dumps(as_document(result)).encode()


def _sequences(result: Any) -> bytes:
    """Return remora's page of sequences as JSON (docs/sequences.md).

    Times are in microseconds; places are included only where known.
    """
    import json  # imported on first use, because this page is rarely requested

    report = cast(SequenceReport, result)
    shown = {
        "strategy": report.strategy,
        "slots": report.slots,
        "active": report.active,
        "backlog": report.backlog,
        "max_sequence_idle_us": report.idle_limit_ns // 1000,
        "sequences": [
            {
                "correlation_id": row.id,
                "state": row.state,
                **_place(row.instance, row.slot),
                "running": row.running,
                "requests_waiting": row.waiting,
                "idle_us": row.idle_ns // 1000,
            }
            for row in report.live
        ],
        "ended": [
            {"correlation_id": row.id, "why": row.why, **_place(row.instance, row.slot), "ago_us": row.ago_ns // 1000}
            for row in report.ended
        ],
        "refused": [
            {
                "correlation_id": row.id,
                "request_id": row.request_id,
                "error": row.error,
                "explanation": row.explanation,
                "ago_us": row.ago_ns // 1000,
            }
            for row in report.refused
        ],
    }
    return json.dumps(shown, separators=(",", ":")).encode()


def _place(instance: str, slot: int) -> dict[str, object]:
    return {"instance": instance, "slot": slot} if instance else {}


def _durations(holder: object, names: tuple[str, ...]) -> bytes:
    parts = []
    for name in names:
        duration: Duration = getattr(holder, name)
        parts.append(b'"%b":{"count":%d,"ns":%d}' % (name.encode(), duration.count, duration.ns))
    return b",".join(parts)


def _release_status(result: Any) -> bytes:
    """Return remora's page of a release as JSON (docs/releases.md)."""
    import json  # imported on first use, because this page is rarely requested

    return json.dumps(result).encode()


def _recent_traces(result: Any) -> bytes:
    """Return remora's page of traces as JSON (docs/tracing.md)."""
    import json  # imported on first use, because this page is rarely requested

    return json.dumps({"traces": result}).encode()


def _explanation(result: Any) -> bytes:
    import orjson  # remora's own page, so Triton's exact bytes do not matter

    return orjson.dumps(result.document())


def _list(items: list[bytes]) -> bytes:
    return b"[%b]" % b",".join(items)


_RESULTS: dict[str, Callable[[Any], bytes]] = {
    "server_metadata": _server,
    "model_metadata": _metadata,
    "model_config": _config,
    "model_stats": _statistics,
    "model_sequences": _sequences,
    "startup": _startup,
    "recent_traces": _recent_traces,
    "all_stats": _statistics,
    "model_explain": _explanation,
    "index": _entries,
    "release": _release_status,
    "trace": print_settings,
    "logging": print_settings,
}
