"""ModelStreamInfer over real sockets: a fake engine or real models behind it, Triton's own client before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest

from remora.engine import Engine
from remora.errors import (
    InternalError,
    NotFoundError,
)
from remora.messages import Response, Streamed
from remora.options import ServerOptions
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.status import open_forward
from remora.protocols.restriction import Restrictions
from remora.server.grpc.front import GrpcFront
from remora.server.grpc.grpcio_transport import GrpcServer
from remora.server.grpc.rpcs import MAX_STREAMS, Rpcs
from remora.server.http.http2 import Http2Listener
from remora.server.loop import LoopMailbox
from support.engine.engine_by_hand import PATIENCE_S, ByHand, response

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


class Client:
    """One stream of a client: `send` and `half_close` write, `next` reads."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self.call = channel.stream_stream(METHOD)(iter(self.outgoing.get, None), metadata=metadata, timeout=PATIENCE_S)

    def send(self, model: str, id: str = "", **fields: Any) -> None:
        self.outgoing.put(pb.ModelInferRequest(model_name=model, id=id, **fields).SerializeToString())

    def half_close(self) -> None:
        self.outgoing.put(None)

    def next(self) -> pb.ModelStreamInferResponse:
        return pb.ModelStreamInferResponse.FromString(next(self.call))

    def ids(self) -> list[str]:
        """Of all that still comes."""
        return [pb.ModelStreamInferResponse.FromString(each).infer_response.id for each in self.call]

    def status(self) -> tuple[Any, str]:
        with pytest.raises(grpc.RpcError):
            list(self.call)
        return self.call.code(), self.call.details()


@contextmanager
def on_grpcio(engine: Any, streams: int = MAX_STREAMS, **chosen: Any) -> Iterator[tuple[Callable[[], None], Any]]:
    """A server on grpcio: how it drains, and a channel to it."""
    options = ServerOptions(http_address="127.0.0.1", grpc_port=0, grpc_transport="grpcio", **chosen)
    server = GrpcServer(engine, options, streams=streams)
    port = server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.port = port
            yield server.drain, channel
    finally:
        server.stop(0)


@contextmanager
def on_own_http2(
    engine: Any, streams: int = MAX_STREAMS, grpc_infer_thread_count: int = 4, grpc_header_forward_pattern: str = ""
) -> Iterator[tuple[Callable[[], None], Any]]:
    """The same on the built-in HTTP/2, with its loop in a thread."""
    loop = asyncio.new_event_loop()
    calls = Rpcs(engine, Restrictions(), streams, open_forward(grpc_header_forward_pattern))

    async def start() -> tuple[GrpcFront, Http2Listener, asyncio.Server]:
        front = GrpcFront(
            engine, calls, LoopMailbox(loop), 1 << 20, workers=grpc_infer_thread_count, streams=2 * streams
        )
        listener = Http2Listener(front.open)
        return front, listener, await loop.create_server(listener.connection, "127.0.0.1", 0)

    async def stop() -> None:
        for connection in list(listener.connections):
            connection.abort()
        server.close()
        front.close()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    front, listener, server = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
    port = server.sockets[0].getsockname()[1]

    def drain() -> None:
        calls.drain()
        front.drain()

    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.port = port
            yield drain, channel
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


Serving = Callable[..., AbstractContextManager[tuple[Callable[[], None], Any]]]


@pytest.fixture(params=[on_own_http2, on_grpcio])
def serving(request: pytest.FixtureRequest) -> Serving:
    """Each transport, because both have the same streams."""
    found: Serving = request.param
    return found


def is_final(message: pb.ModelStreamInferResponse) -> bool:
    return message.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("swaps", [1, 3])
def test_a_request_whose_model_is_replaced_meanwhile_goes_to_what_serves_then(serving: Serving, swaps: int) -> None:
    engine = ByHand(swaps=swaps)
    with serving(engine) as (_, channel):
        client = Client(channel)
        client.send("plain", "a")
        engine.next().answer(Response([]))
        assert client.next().infer_response.id == "a"
        client.half_close()
        assert client.ids() == []


def test_answers_of_plain_models_wait_for_those_before_them(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (_, channel):
        client = Client(channel)
        client.send("plain", "1")
        client.send("plain", "2")
        client.send("nope", "3")
        client.send("many", "4")
        client.half_close()
        first, second, many = engine.next(), engine.next(), engine.next()
        many.answer(Streamed(response(), True))
        assert client.next().infer_response.id == "4"
        second.answer(response())
        first.answer(response())
        assert client.ids() == ["1", "2", "3"]
        assert client.call.code() is grpc.StatusCode.OK


def test_answers_of_decoupled_models_leave_as_they_come(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (_, channel):
        client = Client(channel)
        client.send("many", "a")
        client.send("many", "b")
        client.half_close()
        first, second = engine.next(), engine.next()
        seen = []
        for asked, final in ((second, False), (first, False), (second, True), (first, True)):
            asked.answer(Streamed(response(), final))
            message = client.next()
            seen.append((message.infer_response.id, is_final(message)))
        assert seen == [("b", False), ("a", False), ("b", True), ("a", True)]
        assert client.ids() == []


def test_an_empty_final_answer_ends_the_request_with_or_without_a_message(serving: Serving) -> None:
    engine = ByHand()
    wish = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}
    with serving(engine) as (_, channel):
        client = Client(channel)
        client.send("many", "quiet")
        client.send("many", "loud", parameters=wish)
        client.half_close()
        for _ in range(2):
            engine.next().answer(Streamed(None, True))
        assert client.ids() == ["loud"]


def test_refusals_and_failures_are_messages_and_the_stream_goes_on(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (_, channel):
        client = Client(channel)
        for model, id in (("nope", "1"), ("plain", "bad"), ("plain", "2")):
            client.send(model, id)
        client.send("plain", "3", model_version="x")
        client.half_close()
        engine.next().answer(InternalError("failed"))
        messages = [client.next() for _ in range(4)]
        assert [(each.error_message[:20], each.infer_response.id) for each in messages] == [
            ("Request for unknown ", "1"),
            ("it does not fit", "bad"),
            ("failed", "2"),
            ("failed to get model ", "3"),
        ]
        assert [each.infer_response.model_name for each in messages] == ["", "", "plain", ""]
        assert client.ids() == []


def test_an_answer_that_no_message_can_carry_is_an_error_and_the_stream_goes_on(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (_, channel):
        client = Client(channel)
        client.send("plain", "1")
        client.send("plain", "2")
        client.half_close()
        odd: dict[str, Any] = {"p": object()}
        engine.next().answer(Response([], odd))
        engine.next().answer(response())
        assert client.next().error_message.startswith("internal error")
        assert client.ids() == ["2"]


def test_a_strict_client_gets_a_models_error_as_the_status_and_all_else_is_cancelled(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (_, channel):
        client = Client(channel, (("triton_grpc_error", "true"),))
        client.send("nope", "1")
        assert client.next().infer_response.id == "1"
        client.send("many", "waits")
        client.send("many", "fails")
        engine.next()
        engine.next().answer(Streamed(NotFoundError("model says 3"), True))
        assert client.status() == (grpc.StatusCode.NOT_FOUND, "model says 3")
        assert engine.cancelled.get(timeout=PATIENCE_S) == "waits"


def test_half_closing_waits_for_all_answers(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (_, channel):
        client = Client(channel)
        client.send("many", "a")
        client.half_close()
        asked = engine.next()
        for final in (False, False, True):
            asked.answer(Streamed(response(), final))
        assert client.ids() == ["a", "a", "a"]


def test_a_client_that_leaves_cancels_all_that_is_under_way(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (_, channel):
        client = Client(channel)
        client.send("many", "a")
        client.send("plain", "b")
        asked = [engine.next(), engine.next()]
        client.call.cancel()
        assert {engine.cancelled.get(timeout=PATIENCE_S) for _ in asked} == {"a", "b"}
        for each in asked:
            each.answer(Streamed(response(), False))  # later responses are ignored


def test_bytes_that_are_not_a_request_end_the_stream(serving: Serving) -> None:
    with serving(ByHand()) as (_, channel):
        client = Client(channel)
        client.outgoing.put(b"\xff\xff")
        code, text = client.status()
        assert code is grpc.StatusCode.INTERNAL
        assert text.startswith("Unable to parse request")


def test_more_streams_than_are_allowed_are_refused(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine, streams=1) as (_, channel):
        first = Client(channel)
        first.send("plain", "a")
        asked = engine.next()
        second = Client(channel)
        second.send("plain", "b")
        code, text = second.status()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "streams are open" in text
        asked.answer(response())
        assert first.next().infer_response.id == "a"


def test_idle_streams_hold_up_no_other_calls(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine, grpc_infer_thread_count=1, streams=8) as (_, channel):
        clients = [Client(channel) for _ in range(8)]
        for number, client in enumerate(clients):
            client.send("nope", str(number))
            assert client.next().infer_response.id == str(number)
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(
            pb.ModelInferRequest(model_name="plain").SerializeToString(), timeout=PATIENCE_S
        )
        engine.next().answer(response())
        assert pb.ModelInferResponse.FromString(call.result()).model_name == "plain"


def test_a_server_that_drains_answers_what_it_has_taken_and_ends_its_streams(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine) as (drain, channel):
        idle, busy = Client(channel), Client(channel)
        idle.send("nope", "x")
        idle.next()
        busy.send("many", "a")
        asked = engine.next()
        drain()
        assert idle.status()[0] is grpc.StatusCode.UNAVAILABLE
        busy.send("many", "late")
        assert "shutting down" in busy.next().error_message
        asked.answer(Streamed(response(), True))
        assert busy.next().infer_response.id == "a"
        assert busy.status()[0] is grpc.StatusCode.UNAVAILABLE


def test_metadata_that_match_become_parameters_of_every_request(serving: Serving) -> None:
    engine = ByHand()
    with serving(engine, grpc_header_forward_pattern="my-.*") as (_, channel):
        client = Client(channel, (("my-key", "v"), ("other", "x")))
        client.send("plain")
        assert engine.next().form.parameters == {"my-key": "v"}


# -- Triton's client and real models --------------------------------------------------------------------------------

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            for index in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([index], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    folder = tmp_path / "repeat"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL)
    (folder / "config.pbtxt").write_text(CONFIG)
    with Engine(tmp_path) as running:
        yield running


def test_tritons_client_streams_from_a_decoupled_model(serving: Serving, engine: Engine) -> None:
    client_library = pytest.importorskip("tritonclient.grpc")
    arrived: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    counts = [3, 0, 500, 1]
    with serving(engine) as (_, channel), client_library.InferenceServerClient(f"127.0.0.1:{channel.port}") as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for number, count in enumerate(counts):
            given = client_library.InferInput("IN", [1], "INT32")
            given.set_data_from_numpy(np.array([count], np.int32))
            client.async_stream_infer(
                "repeat", [given], request_id=str(number), enable_empty_final_response=number != 3
            )
        seen: dict[str, list[int | None]] = {str(number): [] for number in range(len(counts))}
        for _ in range(sum(counts) + 3):
            result, error = arrived.get(timeout=PATIENCE_S)
            assert error is None
            answer = result.get_response()
            values = result.as_numpy("OUT")
            assert answer.parameters["triton_final_response"].bool_param is (values is None)
            seen[answer.id].append(None if values is None else int(values[0]))
        client.stop_stream()
    assert arrived.empty()
    assert seen == {
        str(number): [*range(count), *([None] if number != 3 else [])] for number, count in enumerate(counts)
    }


def test_a_client_that_stops_its_stream_frees_the_model(serving: Serving, engine: Engine) -> None:
    with serving(engine) as (_, channel):
        client = Client(channel)
        tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="INT32", shape=[1])
        for _ in range(3):
            client.send("repeat", inputs=[tensor], raw_input_contents=[np.array([10_000], "<i4").tobytes()])
        client.next()
        client.call.cancel()
        assert len(list(engine.infer_stream("repeat", {"IN": [2]}))) == 2
