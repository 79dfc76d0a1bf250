"""Streams of one server: how many are open, and what becomes of idle ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remora.errors import RemoraError, UnavailableError
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.status import SHUTDOWN_TEXT
from remora.protocols.restriction import Restrictions
from remora.server.grpc.rpcs import IDLE_NS, Metadata, Rpcs
from remora.server.grpc.stream import InferStream
from support.engine.engine_by_hand import ByCaller, ByHand, response


class FakeCall:
    """Call whose posted work waits for the test, and which does something while its metadata are read."""

    paused = 0

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.mailbox = ByCaller()
        self.posted: list[Callable[[], object]] = []
        self.ends: list[RemoraError | None] = []
        self._meanwhile = meanwhile

    def invocation_metadata(self) -> Metadata:
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        return ()

    def post(self, work: Callable[..., object], *_arguments: Any) -> None:
        self.posted.append(work)

    def run_posted(self) -> None:
        while self.posted:
            self.posted.pop(0)()

    def send(self, message: bytes) -> None:
        """Drop an answer."""

    def consumed(self, size: int) -> None:
        """Drop a credit."""

    def end(self, error: RemoraError | None) -> None:
        self.ends.append(error)


class Server:
    """Behaviours of a server with one stream at a time, and its clock."""

    def __init__(self) -> None:
        self.engine = ByHand()
        self.now_ns = 1
        self.rpcs = Rpcs(self.engine, Restrictions((), ""), 1, now=lambda: self.now_ns)  # type: ignore[arg-type]

    def open(self, call: FakeCall) -> InferStream:
        return self.rpcs.open_stream(call, call)  # type: ignore[arg-type]


def test_streams_that_open_at_the_same_time_are_not_more_than_allowed() -> None:
    server = Server()
    refused: list[str] = []

    def open_another() -> None:
        with pytest.raises(UnavailableError, match="streams are open") as refusal:
            server.open(FakeCall())
        refused.append(refusal.value.message)

    server.open(FakeCall(open_another)).leave()
    assert len(refused) == 1
    server.open(FakeCall())


def test_a_stream_that_gets_a_request_before_it_is_evicted_ends_when_the_server_drains() -> None:
    server, call = Server(), FakeCall()
    stream = server.open(call)
    server.now_ns += IDLE_NS
    server.open(FakeCall()).leave()
    stream.receive(pb.ModelInferRequest(model_name="plain", id="1").SerializeToString())
    call.run_posted()
    with pytest.raises(UnavailableError, match="1 streams are open"):
        server.open(FakeCall())
    server.rpcs.drain()
    server.engine.next().answer(response())
    call.run_posted()
    assert [end.message for end in call.ends if end is not None] == [SHUTDOWN_TEXT]
    stream.leave()
    assert not server.rpcs._streams.all()


@pytest.mark.parametrize("drains", [False, True])
def test_a_stream_that_ends_before_it_is_evicted_is_not_counted_again(drains: bool) -> None:
    server, call = Server(), FakeCall()
    stream = server.open(call)
    server.now_ns += IDLE_NS
    server.open(FakeCall()).leave()
    stream.receive(pb.ModelInferRequest(model_name="plain", id="1").SerializeToString())
    if drains:
        server.rpcs.drain()
    stream.leave()
    call.run_posted()
    assert not server.rpcs._streams.all()
