"""Client side of gRPC for load: unary calls, or requests on one stream.

HTTP/2 begins with prior knowledge.
"""

from __future__ import annotations

import struct
from typing import Any

from remora.errors import UnsupportedError
from remora.system.install_advice import install_command
from remora_tools.load import Answer

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK, _PADDED, _PRIORITY = 1, 4, 1, 8, 32
_CONTINUATION = 9
_LARGE = (1 << 31) - 1
_INITIAL = 65_535
_FRAME = 16_384
_LAST_STREAM = 1 << 30
_PREFIX = 5
_FINAL = "triton_final_response"
_MOST_REASON = 200
_UNARY = "/inference.GRPCInferenceService/ModelInfer"
_STREAMS = "/inference.GRPCInferenceService/ModelStreamInfer"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class GrpcCodec:
    """One connection with one request in flight; see `Codec`.

    A message is a serialised ModelInferRequest. With ``streams`` all requests are sent on one call of ModelStreamInfer,
    and a request is answered by its final response. Raises UnsupportedError without hpack.
    """

    def __init__(
        self, authority: str, metadata: tuple[tuple[str, str], ...] = (), *, tls: bool = False, streams: bool = False
    ) -> None:
        try:
            import hpack
        except ImportError:
            raise UnsupportedError(f"gRPC needs hpack. Install it with: {install_command('grpc')}") from None
        self._decoder: Any = hpack.Decoder()
        encoder = hpack.Encoder()
        encoder.header_table_size = 0  # the same block serves all requests, so that no table may change
        fields = [
            (":method", "POST"),
            (":scheme", "https" if tls else "http"),
            (":path", _STREAMS if streams else _UNARY),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *metadata,
        ]
        self._fields = encoder.encode(fields)
        self._streams = streams
        self._body = b""
        self._events_ns: list[int] = []
        self._stream = -1
        self._buffer = b""
        self._pending = b""
        self._window = self._stream_window = self._initial = _INITIAL
        self._received = 0
        self._block = b""
        self._status: dict[str, str] = {}
        self._out: list[bytes] = []

    def opening(self) -> bytes:
        settings = struct.pack(">HIHI", 4, _LARGE, 1, 4096)  # a large window for answers
        return (
            _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, struct.pack(">I", _LARGE - _INITIAL))
        )

    def request(self, message: bytes) -> bytes:
        self._pending = struct.pack(">BI", 0, len(message)) + message
        if self._streams and self._stream > 0:
            return self._sendable()
        self._stream += 2
        self._status = {}
        self._stream_window = self._initial
        return _frame(_HEADERS, _END_HEADERS, self._stream, self._fields) + self._sendable()

    def _sendable(self) -> bytes:
        frames = []
        while self._pending:
            size = min(len(self._pending), _FRAME, self._window, self._stream_window)
            if size <= 0:
                break
            piece, self._pending = self._pending[:size], self._pending[size:]
            self._window -= size
            self._stream_window -= size
            last = not self._pending and not self._streams
            frames.append(_frame(_DATA, _END_STREAM if last else 0, self._stream, piece))
        return b"".join(frames)

    def outgoing(self) -> bytes:
        found = b"".join(self._out) + self._sendable()
        self._out.clear()
        return found

    def feed(self, data: bytes, now_ns: int) -> Answer | None:
        data = self._buffer + data
        answer, place = None, 0
        while len(data) - place >= 9:
            size = int.from_bytes(data[place : place + 3], "big")
            kind, flags, stream = struct.unpack_from(">BBI", data, place + 3)
            if len(data) - place < 9 + size:
                break
            payload = data[place + 9 : place + 9 + size]
            answer = self._frame(kind, flags, stream & _LARGE, payload, now_ns) or answer
            place += 9 + size
        self._buffer = data[place:]
        return answer

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes, now_ns: int) -> Answer | None:
        if kind == _DATA:
            self._received += len(payload)
            if self._received > _LARGE // 2:  # the window of the connection; that of a stream suffices for an answer
                grown = struct.pack(">I", self._received)
                self._out.append(_frame(_WINDOW, 0, 0, grown))
                if self._streams:
                    self._out.append(_frame(_WINDOW, 0, self._stream, grown))
                self._received = 0
            if self._streams:
                return self._responses(payload, now_ns)
        elif kind in (_HEADERS, _CONTINUATION):
            if kind == _HEADERS:
                payload = payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
                payload = payload[5:] if flags & _PRIORITY else payload
            self._block += payload
            if flags & _END_HEADERS:
                self._status |= dict(self._decoder.decode(self._block))
                self._block = b""
            if kind == _HEADERS and flags & _END_STREAM and stream == self._stream:
                return self._answer(self._status.get("grpc-status") or f"HTTP {self._status.get(':status')}")
        elif kind == _SETTINGS and not flags & _ACK:
            self._settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._out.append(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW:
            increment = struct.unpack(">I", payload)[0]
            if stream == 0:
                self._window += increment
            elif stream == self._stream:
                self._stream_window += increment
        elif kind == _RESET and stream == self._stream:
            return self._answer(f"reset {struct.unpack('>I', payload)[0]}")
        elif kind == _GOAWAY and struct.unpack_from(">I", payload)[0] < self._stream:
            return self._answer("connection refused by GOAWAY")
        return None

    def _responses(self, payload: bytes, now_ns: int) -> Answer | None:
        """Take bytes of ModelStreamInferResponses, and return the answer after a final one."""
        from remora.proto.inference_pb2 import ModelStreamInferResponse

        self._body += payload
        answer, place = None, 0
        while len(self._body) - place >= _PREFIX:
            size = int.from_bytes(self._body[place + 1 : place + _PREFIX], "big")
            if len(self._body) - place < _PREFIX + size:
                break
            response = ModelStreamInferResponse.FromString(self._body[place + _PREFIX : place + _PREFIX + size])
            place += _PREFIX + size
            answer = self._response(response, now_ns) or answer
        self._body = self._body[place:]
        return answer

    def _response(self, response: Any, now_ns: int) -> Answer | None:
        parameters = response.infer_response.parameters
        final = parameters[_FINAL].bool_param if _FINAL in parameters else True
        if response.infer_response.outputs:
            self._events_ns.append(now_ns)
        if not final:
            return None
        answer = Answer(response.error_message[:_MOST_REASON], tuple(self._events_ns))
        self._events_ns = []
        return answer

    def _settings(self, payload: bytes) -> None:
        for number, value in struct.iter_unpack(">HI", payload):
            if number == 4:
                self._stream_window += value - self._initial
                self._initial = value
        self._out.append(_frame(_SETTINGS, _ACK, 0))

    def _answer(self, status: str) -> Answer:
        self._pending = b""
        closes = self._streams or self._stream >= _LAST_STREAM or not status.isdigit()
        if self._streams and status == "0":
            return Answer("the server ended the stream", (), closes)
        return Answer("" if status == "0" else f"gRPC status {status}" if status.isdigit() else status, (), closes)

    def end(self) -> Answer | None:
        return None
