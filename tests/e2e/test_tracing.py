"""Traces of a real server: over HTTP and gRPC, of streams, ensembles and calls between models in worker processes."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from conftest import RunningServer, Serving
from support.servers.trace_receiver import Collector, attributes, collector

CONFIG = """
backend: "python" max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
instance_group { kind: KIND_CPU count: 1 }
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("OUT", self.answer(request))]) for request in requests]

    def answer(self, request):
        given = pb.get_input_tensor_by_name(request, "IN").as_numpy()
        %s
"""
PLAIN = "return given + 1"
CALL = """called = pb.InferenceRequest(
            model_name="plain", inputs=[pb.Tensor("IN", given)], requested_output_names=["OUT"]%s
        ).exec()
        return pb.get_output_tensor_by_name(called, "OUT").as_numpy()"""
TELL = "return np.array([len(request.trace().get_context())], np.int32)"
MANY = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(3):
                sender.send(pb.InferenceResponse([pb.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step { model_name: "plain" input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "t" } }
  step { model_name: "calls" input_map { key: "IN" value: "t" } output_map { key: "OUT" value: "OUT" } }
}
"""
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
BODY = json.dumps({"id": "r", "inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [4]}]})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    codes = {
        "plain": MODEL % PLAIN,
        "calls": MODEL % (CALL % ", trace=request.trace()"),
        "alone": MODEL % (CALL % ""),
        "tells": MODEL % TELL,
        "many": MANY,
    }
    for name, code in codes.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(code)
        more = "model_transaction_policy { decoupled: true }" if name == "many" else ""
        (folder / name / "config.pbtxt").write_text(CONFIG + more)
    (folder / "chain" / "1").mkdir(parents=True)
    (folder / "chain" / "config.pbtxt").write_text(ENSEMBLE)
    return folder


def infer(server: RunningServer, model: str, **headers: str) -> Any:
    return post(server, f"/v2/models/{model}/infer", BODY, **headers)


def post(server: RunningServer, path: str, body: str, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        assert reply.status == 200, answer
        return answer
    finally:
        connection.close()


def tree(received: Collector, count: int) -> list[tuple[str, str]]:
    """Each span's name and that of the span above it."""
    spans = received.spans(count)
    names = {span.span_id: span.name for span in spans}
    return [(span.name, names.get(span.parent_span_id, span.parent_span_id.hex())) for span in spans]


def test_one_trace_goes_through_an_ensemble_into_the_calls_of_a_worker(models: Path, serving: Serving) -> None:
    with collector() as received:
        flags = ("mode=opentelemetry", "rate=0", "level=TIMESTAMPS", f"opentelemetry,url={received.url}")
        with serving(models, *(f"--trace-config={flag}" for flag in flags)) as server:
            infer(server, "chain", traceparent=PARENT)
            infer(server, "alone", traceparent=PARENT)
            assert infer(server, "tells", traceparent=PARENT)["outputs"][0]["data"][0] > len(PARENT)
            assert infer(server, "tells")["outputs"][0]["data"] == [0]
        assert tree(received, 14) == [
            ("InferRequest", "b7ad6b7169203331"),
            ("chain", "InferRequest"),
            ("plain", "chain"),
            ("compute", "plain"),
            ("calls", "chain"),
            ("compute", "calls"),
            ("plain", "calls"),
            ("compute", "plain"),
            ("InferRequest", "b7ad6b7169203331"),
            ("alone", "InferRequest"),
            ("compute", "alone"),
            ("InferRequest", "b7ad6b7169203331"),
            ("tells", "InferRequest"),
            ("compute", "tells"),
        ]
        spans = received.spans(14)
        assert {span.trace_id.hex() for span in spans} == {TRACE}
        ids = {span.name: attributes(span) for span in spans[:8]}
        assert ids["plain"]["triton.trace_parent_id"] == ids["calls"]["triton.trace_id"]


def test_grpc_and_its_streams_carry_contexts_and_tell_of_each_answer(models: Path, serving: Serving) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
    from remora.proto import inference_pb2 as pb

    def message(model: str) -> bytes:
        request = pb.ModelInferRequest(model_name=model, id="g")
        request.inputs.add(name="IN", datatype="INT32", shape=[1]).contents.int_contents.append(4)
        return request.SerializeToString()

    with collector() as received:
        flags = ("mode=opentelemetry", "rate=0", "level=TIMESTAMPS", f"opentelemetry,url={received.url}")
        with serving(models, *(f"--trace-config={flag}" for flag in flags)) as server:
            channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc}")
            with channel:
                service = "/inference.GRPCInferenceService/"
                metadata = (("traceparent", PARENT),)
                channel.unary_unary(f"{service}ModelInfer")(
                    message("plain"), metadata=metadata, timeout=60, wait_for_ready=True
                )
                stream = channel.stream_stream(f"{service}ModelStreamInfer")
                assert (
                    len(list(stream(iter([message("many")]), metadata=metadata, timeout=60, wait_for_ready=True))) >= 3
                )
        spans = received.spans(6)
    assert [span.name for span in spans] == ["InferRequest", "plain", "compute", "InferRequest", "many", "compute"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    received_events = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "INFER_RESPONSE_COMPLETE"]
    sent = ["GRPC_SEND_START", "GRPC_SEND_END"]
    assert [event.name for event in spans[0].events] == [*received_events, *sent]
    assert [event.name for event in spans[3].events] == [*received_events, *sent * 4]


def test_a_running_server_begins_and_ends_to_write_its_file(models: Path, serving: Serving, tmp_path: Path) -> None:
    with serving(models, f"--trace-config=triton,file={tmp_path}/trace.json") as server:
        infer(server, "plain")
        shown = post(server, "/v2/trace/setting", '{"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}')
        assert shown["trace_level"] == ["TIMESTAMPS"]
        infer(server, "plain")
        post(server, "/v2/models/plain/trace/setting", '{"trace_level": ["OFF"]}')
        infer(server, "plain")
        infer(server, "alone")
    rows = json.loads((tmp_path / "trace.json").read_text())
    assert [row["model_name"] for row in rows if "model_name" in row] == ["plain", "alone"]
