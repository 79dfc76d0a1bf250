"""Table of the V2 gRPC management RPCs, a pure decoder and encoder for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from remora import calls
from remora.calls import Call
from remora.errors import InvalidArgumentError, UnsupportedError
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.request import parsed, version_of
from remora.protocols.grpc.status import utf8
from remora.system.logs import FORMATS, LogSetting, LogSettings
from remora.tracing.settings import TraceSetting, TraceSettings

_M = TypeVar("_M", bound=Message)


class Rpc(NamedTuple):
    """Codec of a management RPC.

    ``decode`` turns request bytes into a call, ``encode`` its result into response bytes. ``decode`` raises
    RemoraError, MalformedError for bytes that are not such a message. ``absent`` is the response for a model that is
    not there or not available, None if that is an error.
    """

    decode: Callable[[bytes], Call]
    encode: Callable[[Any], bytes]
    absent: bytes | None = None


def _rpc(
    kind: type[_M], call: Callable[[_M], Call], answer: Callable[[Any], Message], absent: Message | None = None
) -> Rpc:
    return Rpc(
        lambda message: call(parsed(kind, message)),
        lambda result: answer(result).SerializeToString(),
        None if absent is None else absent.SerializeToString(),
    )


def _model_metadata(info: calls.ModelInfo) -> Message:
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=info.name,
        versions=info.versions,
        platform=info.platform,
        inputs=[tensor(name=each.name, datatype=each.datatype, shape=each.shape) for each in info.inputs],
        outputs=[tensor(name=each.name, datatype=each.datatype, shape=each.shape) for each in info.outputs],
    )


_COUNTED = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_PHASES = ("compute_input", "compute_infer", "compute_output")


def _durations(
    stats: calls.ModelStats | calls.BatchStats | calls.ResponseStats, names: tuple[str, ...]
) -> dict[str, Any]:
    durations: dict[str, calls.Duration] = {name: getattr(stats, name) for name in names}
    return {name: pb.StatisticDuration(count=spent.count, ns=spent.ns) for name, spent in durations.items()}


def _statistics(models: list[calls.ModelStats]) -> Message:
    return pb.ModelStatisticsResponse(
        model_stats=[
            pb.ModelStatistics(
                name=each.name,
                version=each.version,
                last_inference=each.last_inference_ms,
                inference_count=each.inference_count,
                execution_count=each.execution_count,
                inference_stats=pb.InferStatistics(**_durations(each, _COUNTED)),
                batch_stats=[
                    pb.InferBatchStatistics(batch_size=batch.batch_size, **_durations(batch, _PHASES))
                    for batch in each.batches
                ],
                response_stats={
                    key: pb.InferResponseStatistics(**_durations(row, calls.ResponseStats._fields))
                    for key, row in each.responses.items()
                },
            )
            for each in models
        ]
    )


def _index(entries: list[calls.IndexEntry]) -> Message:
    line = pb.RepositoryIndexResponse.ModelIndex
    return pb.RepositoryIndexResponse(
        models=[line(**{key: utf8(text) for key, text in entry._asdict().items()}) for entry in entries]
    )


def _without_repository(name: str) -> None:
    if name:
        raise UnsupportedError("'repository_name' specification is not supported")


def _decode_index(request: pb.RepositoryIndexRequest) -> Call:
    _without_repository(request.repository_name)
    return calls.RepositoryIndex(ready=request.ready)


def _decode_load(request: pb.RepositoryModelLoadRequest) -> Call:
    """Decode a load, whose parameters are a configuration as text and files as bytes [R22]."""
    _without_repository(request.repository_name)
    parameters: dict[str, str | bytes] = {}
    for key, parameter in request.parameters.items():
        if key != "config" and not key.startswith("file:"):
            raise InvalidArgumentError(f"unrecognized load parameter '{key}'.")
        wanted = "string_param" if key == "config" else "bytes_param"
        if parameter.WhichOneof("parameter_choice") != wanted:
            raise InvalidArgumentError(f"invalid value type for load parameter '{key}', expected {wanted}.")
        parameters[key] = getattr(parameter, wanted)
    return calls.ModelLoad(request.model_name, parameters)


def _decode_unload(request: pb.RepositoryModelUnloadRequest) -> Call:
    _without_repository(request.repository_name)
    dependents = False
    if "unload_dependents" in request.parameters:
        parameter = request.parameters["unload_dependents"]
        if parameter.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidArgumentError("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        dependents = parameter.bool_param
    return calls.ModelUnload(request.model_name, dependents)


_LOG_CHOICES = {
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
    "log_file": ("string_param", "string"),
}


def _decode_log(request: pb.LogSettingsRequest) -> Call:
    if "log_file" in request.settings:
        return LogSetting({"log_file": ""})  # always refused, with any value and any other changes
    changes: dict[str, bool | int | str] = {}
    for name, (choice, kind) in _LOG_CHOICES.items():
        if name in request.settings:
            if request.settings[name].WhichOneof("parameter_choice") != choice:
                raise InvalidArgumentError(f"expect {kind} for '{name}'")
            changes[name] = getattr(request.settings[name], choice)
    if (form := changes.get("log_format", FORMATS[0])) not in FORMATS:
        raise InvalidArgumentError(f"invalid argument for log_format, got: {form}")  # REST has another text and code
    return LogSetting(changes)


def _log_settings(settings: LogSettings) -> Message:
    value = pb.LogSettingsResponse.SettingValue
    return pb.LogSettingsResponse(
        settings={name: value(**{_LOG_CHOICES[name][0]: setting}) for name, setting in settings._asdict().items()}
    )


def _decode_trace(request: pb.TraceSettingRequest) -> Call:
    """Decode trace settings, where an empty value removes the setting [R23]."""
    changes = {name: tuple(setting.value) or None for name, setting in request.settings.items()}
    return TraceSetting(request.model_name, changes)


def _trace_settings(settings: TraceSettings) -> Message:
    value = pb.TraceSettingResponse.SettingValue
    return pb.TraceSettingResponse(
        settings={
            name: value(value=(setting,) if isinstance(setting, str) else setting)
            for name, setting in settings.shown().items()
        }
    )


RPCS: Mapping[str, Rpc] = {
    "ServerLive": _rpc(
        pb.ServerLiveRequest, lambda _: calls.ServerLive(), lambda live: pb.ServerLiveResponse(live=live)
    ),
    "ServerReady": _rpc(
        pb.ServerReadyRequest, lambda _: calls.ServerReady(), lambda ready: pb.ServerReadyResponse(ready=ready)
    ),
    "ModelReady": _rpc(
        pb.ModelReadyRequest,
        lambda request: calls.ModelReady(request.name, version_of(request.version)),
        lambda ready: pb.ModelReadyResponse(ready=ready),
        absent=pb.ModelReadyResponse(),  # [R04]
    ),
    "ServerMetadata": _rpc(
        pb.ServerMetadataRequest,
        lambda _: calls.ServerMetadata(),
        lambda info: pb.ServerMetadataResponse(**info._asdict()),
    ),
    "ModelMetadata": _rpc(
        pb.ModelMetadataRequest,
        lambda request: calls.ModelMetadata(request.name, version_of(request.version)),
        _model_metadata,
    ),
    "ModelConfig": _rpc(
        pb.ModelConfigRequest,
        lambda request: calls.ModelConfig(request.name, version_of(request.version)),
        lambda config: pb.ModelConfigResponse(config=config),
    ),
    "ModelStatistics": _rpc(
        pb.ModelStatisticsRequest,
        lambda request: calls.ModelStatistics(request.name, version_of(request.version)),
        _statistics,
    ),
    "RepositoryIndex": _rpc(pb.RepositoryIndexRequest, _decode_index, _index),
    "RepositoryModelLoad": _rpc(
        pb.RepositoryModelLoadRequest, _decode_load, lambda _: pb.RepositoryModelLoadResponse()
    ),
    "RepositoryModelUnload": _rpc(
        pb.RepositoryModelUnloadRequest, _decode_unload, lambda _: pb.RepositoryModelUnloadResponse()
    ),
    "LogSettings": _rpc(pb.LogSettingsRequest, _decode_log, _log_settings),
    "TraceSetting": _rpc(pb.TraceSettingRequest, _decode_trace, _trace_settings),
}
"""Management RPCs by method name [R01]."""
