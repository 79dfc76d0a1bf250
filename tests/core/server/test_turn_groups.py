"""Inferences of one turn of the loop: which are queued in one step, which alone, and that each gets its own answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

import hpack

from remora.engine import Engine
from remora.errors import NotFoundError, RemoraError, UnavailableError
from remora.messages import InferForm, InputSpec
from remora.models.served_model import ServedModel, Submitted
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.framing import framed
from remora.protocols.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame
from remora.protocols.rest.infer import InferCodec
from remora.protocols.restriction import Restrictions
from remora.server.grpc.front import GrpcFront, InferenceCall
from remora.server.grpc.rpcs import Rpcs
from remora.server.http.http1_listener import Listener
from remora.server.http.http2 import Http2Listener
from remora.server.http.port_services import port_service
from remora.server.http.rest import RestService
from remora.server.loop import LoopMailbox
from remora.server.turn_groups import TurnGroups
from support.engine.fakes import FakeTransport
from support.models.onnx_models import identity
from support.process.eventually import eventually_in_loop


class FakeHeader:
    """Two tensors, of two bytes and of one."""

    form = InferForm((InputSpec("a", "UINT8", (2,)), InputSpec("b", "UINT8", (1,))))
    slices = (slice(1, 3), slice(3, 4))


class FakeInference:
    def __init__(self, body: bytes, log: list[Any]) -> None:
        self.body = body
        self.ticket: Any = None
        self.cancelled = False
        self.log = log

    def start(self) -> None:
        self.log.append(("alone", self.body))

    def refuse(self, error: RemoraError) -> None:
        self.log.append(("refused", self.body, error.message))


class FakeTicket:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeModel:
    is_plain = queues_together = True

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.refused: list[tuple[int, RemoraError]] = []

    def submit_all(self, form: InferForm, columns: Any, reply: Any, mailbox: Any, contexts: Any) -> Submitted:
        self.log.append(("together", [bytes(column) for column in columns], contexts))
        return Submitted([FakeTicket() for _ in contexts], self.refused)  # type: ignore[misc]


class FakeEngine:
    """Engine of one model, which is also its own traces: none."""

    on = False
    capture: Any = None

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.model = FakeModel(self.log)
        self.traces = self

    def resolve(self, name: str, version: int) -> FakeModel:
        if name != "m":
            raise NotFoundError(name)
        return self.model


class ByHand:
    """Loop whose turns end by hand."""

    def __init__(self, *, here: bool = True) -> None:
        self.here = here
        self.work: list[Callable[[], None]] = []

    def collect(self, work: Callable[[], None]) -> bool:
        if self.here:
            self.work.append(work)
        return self.here

    def end(self) -> None:
        self.work.pop()()
        assert not self.work


def groups(engine: FakeEngine, loop: ByHand) -> TurnGroups[FakeInference]:
    def contexts(_model: object, inferences: list[FakeInference]) -> list[str]:
        return [f"context of {inference.body!r}" for inference in inferences]

    everything: Any = (engine, None, loop, None, contexts)
    return TurnGroups(*everything)


def add(turn: TurnGroups[FakeInference], own: FakeHeader, inference: FakeInference, model: str = "m") -> None:
    assert turn.begun or turn.begin()
    turn.add(model, -1, own, inference)


def test_inferences_with_one_header_are_queued_in_one_step() -> None:
    engine, loop, own = FakeEngine(), ByHand(), FakeHeader()
    turn = groups(engine, loop)
    inferences = [FakeInference(body, engine.log) for body in (b"?ab1", b"?cd2", b"?ef3")]
    for inference in inferences:
        add(turn, own, inference)
    assert not engine.log
    loop.end()
    assert engine.log == [
        ("together", [b"abcdef", b"123"], ["context of b'?ab1'", "context of b'?cd2'", "context of b'?ef3'"])
    ]
    assert all(inference.ticket is not None for inference in inferences)
    for inference in inferences[:2]:
        add(turn, own, inference)
    loop.end()
    assert engine.log[1][1] == [b"abcd", b"12"], "the next turn begins empty"


def test_a_single_inference_and_those_of_other_models_and_versions_start_alone() -> None:
    engine, loop, own = FakeEngine(), ByHand(), FakeHeader()
    turn = groups(engine, loop)
    add(turn, own, FakeInference(b"?ab1", engine.log))
    turn.add("other", -1, own, FakeInference(b"?cd2", engine.log))
    turn.add("m", 2, own, FakeInference(b"?ef3", engine.log))
    turn.add("m", -1, FakeHeader(), FakeInference(b"?gh4", engine.log))
    loop.end()
    assert sorted(engine.log) == [("alone", b"?ab1"), ("alone", b"?cd2"), ("alone", b"?ef3"), ("alone", b"?gh4")]


@pytest.mark.parametrize("reason", ["traced", "captured", "sequences", "routed", "unknown", "stopping"])
def test_each_starts_alone_where_the_engine_must_see_it_alone(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, loop, own = FakeEngine(), ByHand(), FakeHeader()
    if reason == "traced":
        engine.on = True
    elif reason == "captured":
        engine.capture = object()
    elif reason == "sequences":
        engine.model.queues_together = False
    elif reason == "routed":
        engine.model.is_plain = False
    elif reason == "stopping":

        def stop(*_: object) -> Submitted:
            raise UnavailableError("stopping")

        monkeypatch.setattr(engine.model, "submit_all", stop)
    turn = groups(engine, loop)
    for body in (b"?ab1", b"?cd2"):
        add(turn, own, FakeInference(body, engine.log), "nothing" if reason == "unknown" else "m")
    loop.end()
    assert engine.log == [("alone", b"?ab1"), ("alone", b"?cd2")]


def test_an_inference_that_is_cancelled_before_the_end_of_the_turn_is_cancelled_in_the_queue() -> None:
    engine, loop, own = FakeEngine(), ByHand(), FakeHeader()
    turn = groups(engine, loop)
    inferences = [FakeInference(body, engine.log) for body in (b"?ab1", b"?cd2")]
    for inference in inferences:
        add(turn, own, inference)
    inferences[1].cancelled = True
    loop.end()
    assert [inference.ticket.cancelled for inference in inferences] == [False, True]


def test_those_that_a_full_queue_refuses_are_answered_with_its_error() -> None:
    engine, loop, own = FakeEngine(), ByHand(), FakeHeader()
    engine.model.refused = [(1, UnavailableError("full"))]
    turn = groups(engine, loop)
    for body in (b"?ab1", b"?cd2"):
        add(turn, own, FakeInference(body, engine.log))
    loop.end()
    assert engine.log[1:] == [("refused", b"?cd2", "full")]


def test_a_turn_begins_once_and_only_where_the_loop_collects() -> None:
    engine, loop = FakeEngine(), ByHand()
    turn = groups(engine, loop)
    assert not turn.begun
    assert turn.begin()
    assert turn.begun
    loop.end()
    assert not turn.begun
    assert not groups(engine, ByHand(here=False)).begin()


# -- through both wires ---------------------------------------------------------------------------------------------

CLIENTS = 5
Together = list[int]


@contextmanager
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Together]]:
    """An engine with an identity of [n,2], and how many requests each step has queued together."""
    folder = tmp_path / "same" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(identity().SerializeToString())
    (folder.parent / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching {}\n')
    steps: Together = []
    submit_all = ServedModel.submit_all

    def counting(model: ServedModel, form: Any, columns: Any, reply: Any, mailbox: Any, contexts: Any) -> Submitted:
        steps.append(len(contexts))
        return submit_all(model, form, columns, reply, mailbox, contexts)

    monkeypatch.setattr(ServedModel, "submit_all", counting)
    with Engine(tmp_path) as engine:
        yield engine, steps


def values(client: int, turn: int) -> bytes:
    return np.array([client, turn], "<f4").tobytes()


def http_request(tensor: bytes) -> bytes:
    described = (
        b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}],'
        b'"parameters":{"binary_data_output":true}}'
    )
    return (
        b"POST /v2/models/same/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nInference-Header-Content-Length: %d\r\n"
        b"Content-Length: %d\r\n\r\n%b%b" % (len(described), len(described) + 8, described, tensor)
    )


def receive(connection: Any, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def test_http_clients_of_one_turn_are_queued_together_and_get_their_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(engine: Engine, steps: Together) -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        rest = RestService(engine, InferCodec(), mailbox, lambda work, exchange, **_: exchange.respond(work()))
        listener = Listener(port_service("127.0.0.1", rest, ()), max_body_bytes=1 << 20)
        pairs = [(listener.connection(), FakeTransport()) for _ in range(CLIENTS)]
        for connection, transport in pairs:
            connection.connection_made(transport)
        for turn in range(3):  # the first one fills the memos
            for client, (connection, transport) in enumerate(pairs):
                transport.written.clear()
                receive(connection, http_request(values(client, turn)))
            await eventually_in_loop(lambda: all(transport.written for _, transport in pairs))
            for client, (_, transport) in enumerate(pairs):
                assert transport.written.startswith(b"HTTP/1.1 200")
                assert transport.written.endswith(values(client, turn))
        assert steps[-1] == CLIENTS
        receive(pairs[0][0], http_request(values(0, 3)))
        receive(pairs[1][0], http_request(values(1, 3)))
        pairs[1][0].connection_lost(None)  # in the same turn
        pairs[0][1].written.clear()
        await eventually_in_loop(lambda: bool(pairs[0][1].written))
        assert pairs[0][1].written.endswith(values(0, 3))
        for connection, _ in (pairs[0], *pairs[2:]):
            connection.connection_lost(None)

    with serving(tmp_path, monkeypatch) as (engine, steps):
        asyncio.run(play(engine, steps))
        stats = engine.resolve("same").stats()
        assert (stats.success.count, stats.fail.count) == (3 * CLIENTS + 1, 1)


def grpc_call(stream: int, packed: bytes, tensor: bytes) -> bytes:
    message: Any = pb.ModelInferRequest(model_name="same", raw_input_contents=[tensor])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    body = framed(message.SerializeToString())
    return frame(HEADERS, END_HEADERS, stream, packed) + frame(DATA, END_STREAM, stream, body)


def test_grpc_calls_of_one_turn_are_queued_together_and_leave_no_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(engine: Engine, steps: Together) -> None:
        front = GrpcFront(engine, Rpcs(engine, Restrictions(), 16), LoopMailbox(asyncio.get_running_loop()), 1 << 20)
        listener = Http2Listener(front.open)
        connection, transport = listener.connection(), FakeTransport()
        connection.connection_made(transport)
        fields = (
            (":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer"),
            (":authority", "127.0.0.1"), ("content-type", "application/grpc"), ("te", "trailers"),
        )  # fmt: skip
        encoder = hpack.Encoder()
        receive(connection, PREFACE + frame(SETTINGS, 0, 0, b"") + grpc_call(1, encoder.encode(fields), values(0, 0)))
        packed = encoder.encode(fields)
        await eventually_in_loop(lambda: transport.written.count(b"grpc-status\x010") == 1)
        numbers = range(3, 3 + 2 * CLIENTS, 2)
        for turn in range(2):
            transport.written.clear()
            streams = [number + turn * 2 * CLIENTS for number in numbers]
            receive(connection, b"".join([grpc_call(each, packed, values(each, turn)) for each in streams]))
            await eventually_in_loop(lambda: transport.written.count(b"grpc-status\x010") == CLIENTS)
            assert all(values(each, turn) in transport.written for each in streams)
        assert steps == [CLIENTS, CLIENTS]
        # An instance's thread drops its batch after the answers. The collector, which would free it too, is off.
        await eventually_in_loop(lambda: not any(type(each) is InferenceCall for each in gc.get_objects()))
        transport.written.clear()
        last = streams[-1]
        two = grpc_call(last + 2, packed, values(1, 9)) + grpc_call(last + 4, packed, values(2, 9))
        receive(connection, two + frame(RST_STREAM, 0, last + 4, bytes(4)))
        await eventually_in_loop(lambda: values(1, 9) in transport.written)
        assert values(2, 9) not in transport.written
        connection.connection_lost(None)
        front.close()

    gc.collect()
    gc.disable()
    try:
        with serving(tmp_path, monkeypatch) as (engine, steps):
            asyncio.run(play(engine, steps))
    finally:
        gc.enable()
