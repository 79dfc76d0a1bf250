"""The grpcio front end over real sockets: a fake engine behind it, grpcio's and Triton's own clients before it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest

from remora import calls
from remora.calls import Call
from remora.engine import Engine
from remora.errors import ConfigError, NotFoundError, UnavailableError, UnknownError
from remora.messages import Data, InferForm, Outcome, Request, Response, Tensor, Ticket
from remora.models.table import LoadingError
from remora.options import ServerOptions
from remora.proto import inference_pb2 as pb
from remora.server.grpc.grpcio_transport import GrpcServer
from remora.tracing.tracer import Traces
from support.engine.engine_by_hand import Served
from support.engine.fakes import UNTRACED

WAIT_S = 60.0


@dataclass
class FakeEngine:
    """Answers every request with its first input doubled, from another thread; or leaves it to the test."""

    traces: Traces = UNTRACED
    by_hand: bool = False
    ready: bool = True
    served: Served = field(default_factory=Served)
    forms: list[InferForm] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    waiting: SimpleQueue[tuple[Ticket, Callable[[Outcome], None]]] = field(default_factory=SimpleQueue)
    cancelled: SimpleQueue[Ticket] = field(default_factory=SimpleQueue)
    refuses: Exception | None = None
    loaded: threading.Event | None = None
    kept_waiting: SimpleQueue[str] = field(default_factory=SimpleQueue)

    def perform(self, call: Call, /) -> Any:
        self.calls.append(call)
        if isinstance(call, calls.ServerReady):
            return self.ready
        if isinstance(call, calls.ModelReady):
            raise NotFoundError(f"Request for unknown model: '{call.model}' is not found")
        if isinstance(call, calls.ModelMetadata):
            if self.loaded is not None and not self.loaded.is_set():
                raise LoadingError("'m' is being loaded", Future())
            return calls.ModelInfo(call.model, ("3",), "", (), ())
        return calls.ServerInfo("triton", "1", ("sequence",))

    def wait_for(self, model: str, version: int, timeout_s: float | None = None, /) -> Any:
        if model != self.served.name:
            raise NotFoundError(f"Request for unknown model: '{model}' is not found")
        if self.loaded is not None:
            self.kept_waiting.put(model)
            assert self.loaded.wait(WAIT_S)
        return replace(self.served, submit=self.submit)

    submit_to = Engine.submit_to
    capture = None

    def submit(
        self,
        form: InferForm,
        data: list[Data],
        reply: Callable[[Ticket, Outcome], None],
        /,
        *,
        timeout_ns: int = 0,
    ) -> Ticket:
        if self.refuses is not None:
            raise self.refuses
        self.forms.append(form)
        ticket = WatchedTicket(self.cancelled, form, reply)
        if self.by_hand:
            self.waiting.put((ticket, lambda outcome: reply(ticket, outcome)))
            return ticket
        values = np.frombuffer(data[0], "<f4").reshape(form.inputs[0].shape)  # type: ignore[arg-type]
        response = Response([Tensor("Y", "FP32", values * 2)], {"seen": len(form.parameters)})
        threading.Thread(target=reply, args=(ticket, response)).start()
        return ticket


class WatchedTicket(Ticket):
    """A ticket that tells a queue when it is cancelled."""

    __slots__ = ("_told",)

    def __init__(self, told: SimpleQueue[Ticket], form: InferForm, reply: Any) -> None:
        super().__init__(Request(form, {}, ("Y",), 1, None), reply)
        self._told = told

    def cancel(self) -> None:
        super().cancel()
        self._told.put(self)


def options_of(**chosen: Any) -> ServerOptions:
    return ServerOptions(**{"http_address": "127.0.0.1", "grpc_port": 0, "grpc_transport": "grpcio"} | chosen)


@contextmanager
def serving(engine: FakeEngine, **chosen: Any) -> Iterator[tuple[GrpcServer, Any]]:
    server = GrpcServer(engine, options_of(**chosen))
    port = server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.port = port
            yield server, channel
    finally:
        server.stop(0)


def rpc(channel: Any, method: str, service: str = "inference.GRPCInferenceService") -> Any:
    return channel.unary_unary(f"/{service}/{method}")


def infer_bytes(model: str = "m", **fields: Any) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="FP32", shape=[1, 2])
    raw = np.array([1, 2], "<f4").tobytes()
    return pb.ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[raw], **fields
    ).SerializeToString()


def failure(call: Callable[[], Any]) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details()


# -- Inference ------------------------------------------------------------------------------------------------------


def test_an_inference_comes_back_with_name_version_id_and_parameters() -> None:
    with serving(FakeEngine()) as (_, channel):
        answer = pb.ModelInferResponse.FromString(
            rpc(channel, "ModelInfer")(infer_bytes(id="r"), metadata=[("my-header", "v")], timeout=WAIT_S)
        )
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "3", "r")
    assert answer.raw_output_contents == [np.array([2, 4], "<f4").tobytes()]
    assert answer.parameters["seen"].int64_param == 0  # Without a pattern nothing is forwarded.


def test_metadata_that_match_become_parameters() -> None:
    engine = FakeEngine()
    with serving(engine, grpc_header_forward_pattern="my-.*") as (_, channel):
        metadata = [("not-my-header", "value"), ("other", "x"), ("my-bytes-bin", b"\x00")]
        rpc(channel, "ModelInfer")(infer_bytes(), metadata=metadata, timeout=WAIT_S)
    assert engine.forms[0].parameters == {"not-my-header": "value", "my-bytes-bin": "\x00"}


@pytest.mark.parametrize(
    ("engine", "message", "code", "text"),
    [
        (FakeEngine(), b"\xff\xff\xff", "INTERNAL", "Unable to parse request: the bytes are not a valid Model"),
        (FakeEngine(), infer_bytes("nope"), "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
        (FakeEngine(), infer_bytes(model_version="x"), "INVALID_ARGUMENT", "failed to get model version from specif"),
        (
            FakeEngine(served=Served(decoupled=True)),
            infer_bytes(),
            "UNIMPLEMENTED",
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        ),
        (FakeEngine(refuses=UnavailableError("Exceeds maximum queue size")), infer_bytes(), "UNAVAILABLE", "Exceeds"),
        (FakeEngine(refuses=ZeroDivisionError("secret")), infer_bytes(), "INTERNAL", "internal error: the server's"),
    ],
)
def test_a_refusal_has_its_status_and_text(engine: FakeEngine, message: bytes, code: str, text: str) -> None:
    with serving(engine) as (_, channel):
        status, details = failure(lambda: rpc(channel, "ModelInfer")(message, timeout=WAIT_S))
    assert status.name == code
    assert details.startswith(text)


def test_an_unknown_model_is_found_before_the_inputs_are_read() -> None:
    message = pb.ModelInferRequest(
        model_name="nope", inputs=[pb.ModelInferRequest.InferInputTensor(name="X")]
    ).SerializeToString()
    with serving(FakeEngine()) as (_, channel):
        assert failure(lambda: rpc(channel, "ModelInfer")(message, timeout=WAIT_S))[0] is grpc.StatusCode.NOT_FOUND


def test_a_models_error_keeps_its_code_however_long_its_text() -> None:
    engine = FakeEngine(by_hand=True)
    with serving(engine) as (_, channel):
        future = rpc(channel, "ModelInfer").future(infer_bytes(), timeout=WAIT_S)
        engine.waiting.get(timeout=WAIT_S)[1](UnknownError("line\n" * 50_000))
        status, details = failure(future.result)
    assert status is grpc.StatusCode.UNKNOWN
    assert details.startswith("line\nline\n")
    assert details.endswith("...")


def test_many_requests_wait_together() -> None:
    engine = FakeEngine(by_hand=True)
    with serving(engine) as (_, channel):
        futures = [rpc(channel, "ModelInfer").future(infer_bytes(), timeout=WAIT_S) for _ in range(20)]
        replies = [engine.waiting.get(timeout=WAIT_S)[1] for _ in futures]
        for reply in reversed(replies):
            reply(Response([]))
        assert all(future.result() for future in futures)


def test_a_client_that_cancels_cancels_its_ticket() -> None:
    engine = FakeEngine(by_hand=True)
    with serving(engine) as (_, channel):
        future = rpc(channel, "ModelInfer").future(infer_bytes(), timeout=WAIT_S)
        ticket, _ = engine.waiting.get(timeout=WAIT_S)
        future.cancel()
        assert engine.cancelled.get(timeout=WAIT_S) is ticket
    assert ticket.request.cancelled


def test_a_deadline_that_passes_cancels_the_ticket() -> None:
    engine = FakeEngine(by_hand=True)
    with serving(engine) as (_, channel):
        timeout_s = 0.2
        while engine.waiting.empty():  # it may pass before the request is there: then a later one
            status, _ = failure(lambda: rpc(channel, "ModelInfer")(infer_bytes(), timeout=timeout_s))  # noqa: B023
            assert status is grpc.StatusCode.DEADLINE_EXCEEDED
            timeout_s *= 2
        ticket, _ = engine.waiting.get(timeout=WAIT_S)
        assert engine.cancelled.get(timeout=WAIT_S) is ticket


def test_health_is_answered_while_every_worker_waits_for_a_model() -> None:
    engine = FakeEngine(by_hand=True)
    with serving(engine, grpc_infer_thread_count=1) as (_, channel):
        future = rpc(channel, "ModelInfer").future(infer_bytes(), timeout=WAIT_S)
        _, reply = engine.waiting.get(timeout=WAIT_S)
        assert rpc(channel, "Check", "grpc.health.v1.Health")(b"", timeout=WAIT_S) == b"\x08\x01"
        assert rpc(channel, "ServerReady")(b"", timeout=WAIT_S) == b"\x08\x01"
        reply(Response([]))
        assert future.result()


def test_health_is_answered_while_many_ask_about_a_model_that_is_being_loaded() -> None:
    engine = FakeEngine(loaded=threading.Event())
    asked = pb.ModelMetadataRequest(name="m").SerializeToString()
    with serving(engine) as (_, channel):
        futures = [rpc(channel, "ModelMetadata").future(asked, timeout=WAIT_S) for _ in range(8)]
        for _ in futures:
            engine.kept_waiting.get(timeout=WAIT_S)
        assert rpc(channel, "ServerReady")(b"", timeout=WAIT_S) == b"\x08\x01"
        engine.loaded.set()
        assert {pb.ModelMetadataResponse.FromString(future.result()).name for future in futures} == {"m"}


# -- The other services ---------------------------------------------------------------------------------------------


def test_management_rpcs_reach_the_engine_as_calls() -> None:
    engine = FakeEngine()
    with serving(engine) as (_, channel):
        info = pb.ServerMetadataResponse.FromString(rpc(channel, "ServerMetadata")(b"", timeout=WAIT_S))
        ready = pb.ModelReadyResponse.FromString(rpc(channel, "ModelReady")(b"\x0a\x04nope", timeout=WAIT_S))
    assert info.name == "triton"
    assert not ready.ready
    assert engine.calls == [calls.ServerMetadata(), calls.ModelReady("nope", -1)]


@pytest.mark.parametrize("service", [b"", b"\x0a\x05other"])
def test_health_is_that_of_the_server_for_every_service(service: bytes) -> None:
    engine = FakeEngine()
    with serving(engine) as (_, channel):
        check = rpc(channel, "Check", "grpc.health.v1.Health")
        assert check(service, timeout=WAIT_S) == b"\x08\x01"
        engine.ready = False
        assert check(service, timeout=WAIT_S) == b"\x08\x02"


def test_health_needs_the_secret_that_it_was_given_and_other_groups_need_none() -> None:
    with serving(FakeEngine(), grpc_restricted_protocol=("health:who=me",)) as (_, channel):
        check = rpc(channel, "Check", "grpc.health.v1.Health")
        text = "This protocol is restricted, expecting header 'triton-grpc-protocol-who'"
        for ask in (check, rpc(channel, "ServerLive")):
            assert failure(lambda ask=ask: ask(b"", timeout=WAIT_S)) == (grpc.StatusCode.UNAVAILABLE, text)
        assert check(b"", metadata=[("triton-grpc-protocol-who", "me")], timeout=WAIT_S) == b"\x08\x01"
        assert rpc(channel, "ServerMetadata")(b"", timeout=WAIT_S)


@pytest.mark.parametrize("method", ["CudaSharedMemoryRegister", "SystemSharedMemoryRegister"])
def test_what_is_not_offered_says_so(method: str) -> None:
    with serving(FakeEngine()) as (_, channel):
        status, details = failure(lambda: rpc(channel, method)(b"", timeout=WAIT_S))
    assert status is grpc.StatusCode.UNIMPLEMENTED
    assert details != "Method not found!"


@pytest.mark.parametrize("path", ["/other.Service/Nothing", "/inference.GRPCInferenceService/Nothing"])
def test_an_unknown_method_is_unimplemented(path: str) -> None:
    with serving(FakeEngine()) as (_, channel):
        status, _ = failure(lambda: channel.unary_unary(path)(b"", timeout=WAIT_S))
    assert status is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_shows_the_protocols_own_names(version: str) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    reflection_pb2 = pytest.importorskip(
        "grpc_reflection.v1alpha.reflection_pb2", reason="needs grpcio-reflection: pip install '.[dev]'"
    )

    ask = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
    ]
    with serving(FakeEngine()) as (_, channel):
        method = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        answers = [
            reflection_pb2.ServerReflectionResponse.FromString(answer)
            for answer in method(iter([each.SerializeToString() for each in ask]), timeout=WAIT_S)
        ]
    names = [service.name for service in answers[0].list_services_response.service]
    assert "inference.GRPCInferenceService" in names
    assert "grpc.health.v1.Health" in names
    files = [FileDescriptorProto.FromString(each) for each in answers[1].file_descriptor_response.file_descriptor_proto]
    assert {file.package for file in files} == {"inference"}
    assert answers[2].file_descriptor_response.file_descriptor_proto


# -- Starting and stopping ------------------------------------------------------------------------------------------


def test_while_draining_new_inference_is_refused_and_what_is_under_way_ends() -> None:
    engine = FakeEngine(by_hand=True)
    with serving(engine) as (server, channel):
        future = rpc(channel, "ModelInfer").future(infer_bytes(), timeout=WAIT_S)
        _, reply = engine.waiting.get(timeout=WAIT_S)
        server.drain()
        assert failure(lambda: rpc(channel, "ModelInfer")(infer_bytes(), timeout=WAIT_S)) == (
            grpc.StatusCode.UNAVAILABLE,
            "GRPC server is shutting down and has stopped accepting new requests.",
        )
        assert rpc(channel, "Check", "grpc.health.v1.Health")(b"", timeout=WAIT_S) == b"\x08\x02"
        stopping = threading.Thread(target=server.stop, args=(WAIT_S,))
        stopping.start()
        reply(Response([]))
        assert future.result()
        stopping.join(WAIT_S)
        assert not stopping.is_alive()


def test_a_client_that_is_gone_without_a_word_does_not_hold_up_the_end() -> None:
    with (
        serving(FakeEngine()) as (server, channel),
        socket.create_connection(("127.0.0.1", channel.port), timeout=WAIT_S) as client,
    ):
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert client.recv(1)  # nothing of what comes is answered
        stopping = threading.Thread(target=server.stop, args=(3600.0,))
        stopping.start()
        stopping.join(15.0)  # grpcio itself gives it 20 s
        assert not stopping.is_alive()


def test_when_the_grace_is_over_what_is_under_way_is_cancelled() -> None:
    engine = FakeEngine(by_hand=True)
    with serving(engine) as (server, channel):
        future = rpc(channel, "ModelInfer").future(infer_bytes(), timeout=WAIT_S)
        ticket, _ = engine.waiting.get(timeout=WAIT_S)
        server.stop(0)
        assert engine.cancelled.get(timeout=WAIT_S) is ticket
        assert failure(future.result)[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_a_port_that_is_taken_says_so() -> None:
    with serving(FakeEngine()) as (_, channel):
        taken = GrpcServer(FakeEngine(), options_of(grpc_port=channel.port))
        with pytest.raises(UnavailableError, match=f"gRPC cannot listen on 127.0.0.1:{channel.port}"):
            taken.start()


@pytest.mark.parametrize(
    "chosen",
    [
        {"grpc_max_message_size": 1 << 32},
        {"grpc_on_http_port": True, "http_max_input_size": 1 << 31},
    ],
)
def test_a_limit_of_messages_beyond_those_of_grpc_is_served(chosen: dict[str, Any]) -> None:
    with serving(FakeEngine(), **chosen) as (_, channel):
        assert rpc(channel, "ServerReady")(b"", timeout=WAIT_S) == b"\x08\x01"


def test_tls_without_its_files_says_so() -> None:
    server = GrpcServer(FakeEngine(), options_of(grpc_use_ssl=True, grpc_server_key="/no/such.key"))
    with pytest.raises(ConfigError, match=r"--grpc-server-key: '/no/such.key' cannot be read"):
        server.start()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_mutual_tls_serves_only_clients_with_a_certificate(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make.split(), *names], check=True, capture_output=True)
    files = {"grpc_server_key": str(key), "grpc_server_cert": str(cert), "grpc_root_cert": str(cert)}
    server = GrpcServer(FakeEngine(), options_of(grpc_use_ssl_mutual=True, **files))
    target = f"127.0.0.1:{server.start()}"
    root, pair = cert.read_bytes(), (key.read_bytes(), cert.read_bytes())
    try:
        with grpc.secure_channel(target, grpc.ssl_channel_credentials(root, *pair)) as channel:
            assert rpc(channel, "ServerReady")(b"", timeout=WAIT_S) == b"\x08\x01"
        with grpc.secure_channel(target, grpc.ssl_channel_credentials(root)) as channel:
            status, _ = failure(lambda: rpc(channel, "ServerReady")(b"", timeout=WAIT_S))
        assert status is grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop(0)


# -- Triton's own client --------------------------------------------------------------------------------------------


def test_tritonclient_infers_and_reads_errors() -> None:
    client_library = pytest.importorskip("tritonclient.grpc")
    with serving(FakeEngine()) as (_, channel):
        client = client_library.InferenceServerClient(f"127.0.0.1:{channel.port}")
        tensor = client_library.InferInput("X", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2]], "f4"))
        result = client.infer("m", [tensor], request_id="r", client_timeout=WAIT_S)
        assert client.is_server_ready()
        assert client.get_server_metadata().name == "triton"
        with pytest.raises(client_library.InferenceServerException, match="unknown model: 'nope'"):
            client.infer("nope", [tensor], client_timeout=WAIT_S)
        client.close()
    assert result.as_numpy("Y").tolist() == [[2.0, 4.0]]
    assert result.get_response().model_version == "3"
