"""Requests and results of the management RPCs."""

from __future__ import annotations

from typing import Any

import pytest

from remora import calls
from remora.errors import (
    InvalidArgumentError,
    MalformedError,
    RemoraError,
    UnsupportedError,
)
from remora.proto import inference_pb2 as pb
from remora.proto import model_config_pb2
from remora.protocols.grpc.management import RPCS
from remora.protocols.shared_memory import REGION_RPCS

NAMED = pb.ModelReadyRequest(name="m", version="2")


@pytest.mark.parametrize(
    ("method", "message", "call"),
    [
        ("ServerLive", pb.ServerLiveRequest(), calls.ServerLive()),
        ("ServerReady", pb.ServerReadyRequest(), calls.ServerReady()),
        ("ModelReady", NAMED, calls.ModelReady("m", 2)),
        ("ServerMetadata", pb.ServerMetadataRequest(), calls.ServerMetadata()),
        ("ModelMetadata", NAMED, calls.ModelMetadata("m", 2)),
        ("ModelConfig", pb.ModelConfigRequest(name="m"), calls.ModelConfig("m", -1)),
        ("ModelStatistics", pb.ModelStatisticsRequest(), calls.ModelStatistics("", -1)),
        ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True), calls.RepositoryIndex(ready=True)),
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(
                model_name="m",
                parameters={"config": {"string_param": "{}"}, "file:1/model.py": {"bytes_param": b"\x00"}},
            ),
            calls.ModelLoad("m", {"config": "{}", "file:1/model.py": b"\x00"}),
        ),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="m"), calls.ModelUnload("m")),
        (
            "RepositoryModelUnload",
            pb.RepositoryModelUnloadRequest(
                model_name="m", parameters={"unload_dependents": {"bool_param": True}, "x": {"string_param": ""}}
            ),
            calls.ModelUnload("m", unload_dependents=True),
        ),
    ],
)
def test_every_rpc_asks_its_call(method: str, message: Any, call: calls.Call) -> None:
    assert RPCS[method].decode(message.SerializeToString()) == call
    with pytest.raises(MalformedError):
        RPCS[method].decode(b"\xff\xff\xff")


Load, Unload = pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest


@pytest.mark.parametrize(
    ("method", "message", "kind", "text"),
    [
        (
            "RepositoryModelLoad",
            Load(parameters={"foo": {}}),
            InvalidArgumentError,
            "unrecognized load parameter 'foo'.",
        ),
        (
            "RepositoryModelLoad",
            Load(parameters={"config": {"bytes_param": b""}}),
            InvalidArgumentError,
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "RepositoryModelLoad",
            Load(parameters={"file:1/model.py": {"string_param": "x"}}),
            InvalidArgumentError,
            "invalid value type for load parameter 'file:1/model.py', expected bytes_param.",
        ),
        (
            "RepositoryModelLoad",
            Load(repository_name="r"),
            UnsupportedError,
            "'repository_name' specification is not supported",
        ),
        (
            "RepositoryModelUnload",
            Unload(parameters={"unload_dependents": {"string_param": "x"}}),
            InvalidArgumentError,
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
        (
            "RepositoryIndex",
            pb.RepositoryIndexRequest(repository_name="r"),
            UnsupportedError,
            "'repository_name' specification is not supported",
        ),
        (
            "ModelReady",
            pb.ModelReadyRequest(name="m", version="x"),
            InvalidArgumentError,
            "failed to get model version from specified version string 'x' (details: stol), version should be an "
            "integral value > 0",
        ),
    ],
)
def test_a_management_request_that_cannot_be_meant_is_refused(
    method: str, message: Any, kind: type[RemoraError], text: str
) -> None:
    with pytest.raises(kind) as caught:
        RPCS[method].decode(message.SerializeToString())
    assert caught.value.message == text


def test_every_result_is_written_into_its_message() -> None:
    info = calls.ServerInfo("triton", "2", ("sequence",))
    assert pb.ServerMetadataResponse.FromString(RPCS["ServerMetadata"].encode(info)).extensions == ["sequence"]
    assert pb.ServerLiveResponse.FromString(RPCS["ServerLive"].encode(True)).live
    assert RPCS["ServerReady"].encode(False) == b""
    tensor = calls.TensorInfo("A", "FP32", (-1, 4))
    model = calls.ModelInfo("m", ("1", "2"), "python", (tensor,), ())
    metadata = pb.ModelMetadataResponse.FromString(RPCS["ModelMetadata"].encode(model))
    assert (metadata.versions, metadata.inputs[0].shape) == (["1", "2"], [-1, 4])
    config = model_config_pb2.ModelConfig(name="m", max_batch_size=8)
    assert pb.ModelConfigResponse.FromString(RPCS["ModelConfig"].encode(config)).config == config
    index = [calls.IndexEntry("a", "1", "READY"), calls.IndexEntry("b")]
    lines = pb.RepositoryIndexResponse.FromString(RPCS["RepositoryIndex"].encode(index)).models
    assert [(line.name, line.version, line.state, line.reason) for line in lines] == [tuple(each) for each in index]
    reason = pb.RepositoryIndexResponse.FromString(RPCS["RepositoryIndex"].encode([index[1]._replace(reason="\udcff")]))
    assert reason.models[0].reason == "?"
    assert RPCS["RepositoryModelLoad"].encode(None) == RPCS["RepositoryModelUnload"].encode(None) == b""


def test_statistics_always_carry_every_duration() -> None:
    zero = calls.Duration()
    batch = calls.BatchStats(4, zero, calls.Duration(2, 30), zero)
    row = calls.ResponseStats(zero, zero, calls.Duration(1, 7), zero, zero, zero)
    stats = calls.ModelStats("m", "1", 5, 8, 2, calls.Duration(3, 9), *([zero] * 7), (batch,), {"0": row})
    [model] = pb.ModelStatisticsResponse.FromString(RPCS["ModelStatistics"].encode([stats])).model_stats
    assert (model.last_inference, model.inference_count, model.execution_count) == (5, 8, 2)
    assert model.inference_stats.success.ns == 9
    assert model.inference_stats.HasField("cache_miss")
    assert (model.batch_stats[0].batch_size, model.batch_stats[0].compute_infer.ns) == (4, 30)
    assert model.response_stats["0"].success.ns == 7
    assert model.response_stats["0"].HasField("cancel")


def test_every_method_of_the_service_is_in_exactly_one_table() -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    known = [*RPCS, *REGION_RPCS, "ModelInfer", "ModelStreamInfer"]
    assert sorted(known) == sorted(method.name for method in service.methods)
