"""Client side of gRPC, against h2's server side."""

from __future__ import annotations

import struct
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest

from remora.proto import inference_pb2 as pb
from remora_tools.load import Answer
from remora_tools.load.grpc_codec import GrpcCodec


class Peer:
    """A server connection of h2."""

    def __init__(self) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.body = b""
        self.headers: list[dict[str, str]] = []
        self.stream = 0

    def receive(self, data: bytes, acknowledge: bool = True) -> bool:
        """Take bytes and return True at the end of a request."""
        ended = False
        for event in self.connection.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                self.headers.append(dict(event.headers))
                self.stream, self.body = event.stream_id, b""
            elif isinstance(event, h2.events.DataReceived):
                self.body += event.data
                if acknowledge and event.flow_controlled_length:
                    self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                ended = True
        return ended

    def answer(self, status: str, body: bytes = b"abc") -> None:
        fields = [(":status", "200"), ("content-type", "application/grpc"), ("x-long", "y" * 200)]
        self.connection.send_headers(self.stream, fields)
        self.connection.send_data(self.stream, body)
        self.connection.send_headers(self.stream, [("grpc-status", status)], end_stream=True)


def exchange(codec: GrpcCodec, peer: Peer, message: bytes, opening: bytes = b"") -> None:
    """Send a request through the flow control of both sides."""
    ended = peer.receive(opening + codec.request(message))
    for _ in range(10_000):
        if ended:
            return
        assert codec.feed(peer.connection.data_to_send(), 1) is None
        ended = peer.receive(codec.outgoing())
    pytest.fail("the request did not end")


@pytest.mark.parametrize("size", [0, 10, 16_384, 65_530, 300_000])
def test_requests_of_any_size_arrive_whole_and_are_answered(size: int) -> None:
    codec, peer = GrpcCodec("h:1", (("x-key", "k"),)), Peer()
    message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    for number in range(3):
        exchange(codec, peer, message, codec.opening() if not number else b"")
        assert peer.body == struct.pack(">BI", 0, size) + message
        assert peer.headers[-1][":path"] == "/inference.GRPCInferenceService/ModelInfer"
        assert peer.headers[-1]["x-key"] == "k"
        peer.answer("0" if number != 1 else "14")
        answer = codec.feed(peer.connection.data_to_send(), 5)
        assert answer == Answer("" if number != 1 else "gRPC status 14", (), False)
        peer.receive(codec.outgoing())


def test_an_answer_in_single_bytes_is_complete_at_the_end() -> None:
    codec, peer = GrpcCodec("h:1"), Peer()
    exchange(codec, peer, b"m", codec.opening())
    peer.answer("0")
    wire = peer.connection.data_to_send()
    answers = [codec.feed(wire[place : place + 1], 1) for place in range(len(wire))]
    assert [answer is not None for answer in answers] == [False] * (len(wire) - 1) + [True]


def end_of(change: Any) -> Answer | None:
    codec, peer = GrpcCodec("h:1"), Peer()
    exchange(codec, peer, b"m", codec.opening())
    change(peer)
    return codec.feed(peer.connection.data_to_send(), 1)


def test_resets_and_http_errors_are_failures_and_pings_are_answered() -> None:
    assert end_of(lambda peer: peer.connection.reset_stream(peer.stream, 7)) == Answer("reset 7", (), True)
    refused = end_of(lambda peer: peer.connection.send_headers(peer.stream, [(":status", "502")], end_stream=True))
    assert refused == Answer("HTTP 502", (), True)
    gone = end_of(lambda peer: peer.connection.close_connection(last_stream_id=0))
    assert gone == Answer("connection refused by GOAWAY", (), True)
    codec, peer = GrpcCodec("h:1"), Peer()
    exchange(codec, peer, b"m", codec.opening())
    peer.connection.ping(b"12345678")
    assert codec.feed(peer.connection.data_to_send(), 1) is None
    events = peer.connection.receive_data(codec.outgoing())
    assert any(isinstance(event, h2.events.PingAckReceived) for event in events)
    assert codec.end() is None


def stream_response(*, final: bool | None, error: str = "", outputs: int = 1) -> bytes:
    response = pb.ModelStreamInferResponse(error_message=error)
    for number in range(outputs):
        response.infer_response.outputs.add(name=f"y{number}")
    if final is not None:
        response.infer_response.parameters["triton_final_response"].bool_param = final
    content = response.SerializeToString()
    return struct.pack(">BI", 0, len(content)) + content


def streaming() -> tuple[GrpcCodec, Peer]:
    """Return both sides after the first request."""
    codec, peer = GrpcCodec("h:1", tls=True, streams=True), Peer()
    peer.receive(codec.opening() + codec.request(b"one"))
    assert peer.headers[-1][":path"] == "/inference.GRPCInferenceService/ModelStreamInfer"
    assert peer.headers[-1][":scheme"] == "https"
    assert peer.body == struct.pack(">BI", 0, 3) + b"one"
    peer.connection.send_headers(peer.stream, [(":status", "200"), ("content-type", "application/grpc")])
    return codec, peer


def fed(codec: GrpcCodec, peer: Peer, data: bytes, now_ns: int) -> Answer | None:
    peer.connection.send_data(peer.stream, data)
    return codec.feed(peer.connection.data_to_send(), now_ns)


def test_requests_share_a_stream_and_end_with_their_final_responses() -> None:
    codec, peer = streaming()
    assert fed(codec, peer, stream_response(final=False), 5) is None
    both = stream_response(final=False) + stream_response(final=True, outputs=0)
    assert fed(codec, peer, both[:7], 7) is None
    assert fed(codec, peer, both[7:], 9) == Answer("", (5, 9))
    assert not peer.receive(codec.outgoing() + codec.request(b"two"))
    assert (len(peer.headers), peer.body[-3:]) == (1, b"two")
    assert fed(codec, peer, stream_response(final=None), 11) == Answer("", (11,))
    refused = stream_response(final=None, error="no such model", outputs=0)
    assert fed(codec, peer, refused, 12) == Answer("no such model", ())


@pytest.mark.parametrize(("status", "failure"), [("0", "the server ended the stream"), ("14", "gRPC status 14")])
def test_the_end_of_a_stream_closes_the_connection(status: str, failure: str) -> None:
    codec, peer = streaming()
    peer.connection.send_headers(peer.stream, [("grpc-status", status)], end_stream=True)
    assert codec.feed(peer.connection.data_to_send(), 1) == Answer(failure, (), True)
