"""The access log of a server process, read back from its standard error."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports
from support.servers.live_server import ask, client, free_port, process, until, write_version

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def lines_of(text: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if line["logger"] == "remora.access"]


@pytest.mark.parametrize("frontends", ["0", "1"])
def test_each_request_has_a_line_with_its_status_sizes_and_times(
    tmp_path: Path, child_environment: dict[str, str], frontends: str
) -> None:
    write_version(tmp_path / "models", 1)
    port = free_port()
    flags = ("--log-format=json", "--access-log=all", "--request-ids", f"--frontends={frontends}")
    with process(tmp_path / "models", port, child_environment, *flags) as server:
        until(port, "/v2/health/ready", server)
        with client(port) as connection:
            connection.request("GET", "/v2/models/none?secret=1", headers={"X-Request-Id": "r-1", "traceparent": TRACE})
            with connection.getresponse() as reply:
                body = reply.read()
                assert (reply.status, reply.headers["X-Request-Id"]) == (404, "r-1")
            began = time.monotonic()
            assert ask(connection, 3)[0] == 200
            connection.request("GET", "/v2/health/live")
            with connection.getresponse() as reply:
                made = reply.headers["X-Request-Id"]
        server.terminate()
        _, text = server.communicate(timeout=60)
        took = time.monotonic() - began  # a server may read its clock after the client has its answer
    assert "secret" not in text
    *_, missing, inferred, live = lines_of(text)
    assert missing["message"] == "GET /v2/models/none 404"
    assert (missing["severity"], missing["request_id"]) == ("WARNING", "r-1")
    assert missing["httpRequest"]["responseSize"] == str(len(body))
    assert (missing["trace_id"], missing["span_id"]) == (TRACE[3:35], TRACE[36:52])
    assert inferred["httpRequest"]["remoteIp"] == "127.0.0.1"
    assert 0 < float(inferred["httpRequest"]["latency"].rstrip("s")) < took
    assert live["request_id"] == made
    assert len(made) == 32
    if frontends == "0":  # front processes do not know the times of the execution
        assert (inferred["model"], inferred["version"], inferred["batch_size"]) == ("m", "1", 1)
        assert 0 <= inferred["queue_us"] + inferred["compute_us"] <= took * 1e6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models/m", {"IN": [3]}),
        ("/v2/models/m/generate", {"IN": [3]}),
        ("/v2/models/m/generate_stream", {"IN": [3]}),
    ],
)
def test_the_lines_of_other_protocols_name_the_model(
    tmp_path: Path, child_environment: dict[str, str], path: str, body: dict[str, list[int]]
) -> None:
    write_version(tmp_path / "models", 1)
    port = free_port()
    with process(tmp_path / "models", port, child_environment, "--log-format=json", "--access-log=all") as server:
        until(port, "/v2/health/ready", server)
        with client(port) as connection:
            connection.request("POST", path, json.dumps(body))
            with connection.getresponse() as reply:
                answer = reply.read()
                assert reply.status == 200, answer
        server.terminate()
        _, text = server.communicate(timeout=60)
    *_, inferred = lines_of(text)
    assert (inferred["model"], inferred["version"], inferred["batch_size"]) == ("m", "1", 1)


@pytest.mark.parametrize("frontends", ["0", "1"])
def test_grpc_calls_have_lines_with_their_status(
    tmp_path: Path, child_environment: dict[str, str], frontends: str
) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
    from remora.proto import inference_pb2 as pb

    write_version(tmp_path / "models", 1)
    port, grpc_port = free_ports(2)
    flags = ("--log-format=json", "--access-log=errors", "--allow-grpc=true", f"--grpc-port={grpc_port}")
    with process(tmp_path / "models", port, child_environment, *flags, f"--frontends={frontends}") as server:
        until(port, "/v2/health/ready", server)
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "contents": {"int_contents": [3]}}
            good = pb.ModelInferRequest(model_name="m", inputs=[tensor])  # type: ignore[list-item]
            infer(good.SerializeToString(), wait_for_ready=True, timeout=60)
            with pytest.raises(grpc.RpcError):
                infer(pb.ModelInferRequest(model_name="none").SerializeToString(), timeout=60)
        server.terminate()
        _, text = server.communicate(timeout=60)
    calls = [line for line in lines_of(text) if line["httpRequest"].get("protocol") == "gRPC"]
    assert [line["grpc_status"] for line in calls] == [5]
    assert calls[0]["message"].startswith("POST /inference.GRPCInferenceService/ModelInfer")


def test_a_large_grpc_message_is_answered_and_logged(tmp_path: Path, child_environment: dict[str, str]) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
    from remora.proto import inference_pb2 as pb

    write_version(tmp_path / "models", 1)
    config = (tmp_path / "models" / "m" / "config.pbtxt").read_text()
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(config.replace("dims: 1", "dims: -1"))
    port, grpc_port = free_ports(2)
    flags = ("--log-format=json", "--access-log=all", "--allow-grpc=true", f"--grpc-port={grpc_port}")
    values = bytes(4 << 20)
    with process(tmp_path / "models", port, child_environment, *flags) as server:
        until(port, "/v2/health/ready", server)
        most = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", most) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            tensor = {"name": "IN", "datatype": "INT32", "shape": [1, len(values) // 4]}
            asked = pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[values])  # type: ignore[list-item]
            answer = infer(asked.SerializeToString(), wait_for_ready=True, timeout=60)
            assert len(answer) > len(values)
        server.terminate()
        _, text = server.communicate(timeout=60)
    (call,) = (line for line in lines_of(text) if line["httpRequest"].get("protocol") == "gRPC")
    assert (call["grpc_status"], call["rows"]) == (0, 1)
    assert int(call["httpRequest"]["responseSize"]) >= len(values)
    assert "Traceback" not in text


def test_an_invalid_share_is_refused_at_the_start(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 1)
    with process(tmp_path / "models", free_port(), child_environment, "--access-log=2") as server:
        _, text = server.communicate(timeout=60)
    assert "--access-log=2: expected all, errors, off, or a share such as 0.01" in text
    assert server.returncode == 1
