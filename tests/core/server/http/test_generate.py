"""generate and generate_stream between codec and model: what a client gets for each way a model may answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from remora.calls import Metrics
from remora.engine import Engine
from remora.errors import InternalError, NotFoundError, RemoraError, UnavailableError
from remora.messages import Data, InferForm, Mailbox, Outcome, Response, Streamed, Tensor, Ticket
from remora.protocols.http1 import Head
from remora.protocols.rest.generate import EVENTS, NOT_ONE_RESPONSE
from remora.protocols.rest.request import RequestLimits
from remora.protocols.rest.routes import route
from remora.scheduling.batching import expired_error
from remora.server.http.generate import GenerateRoutes
from remora.server.http.large_bodies import LARGE_BYTES, LargeBodies
from remora.signature import Signature
from support.engine.fakes import UNTRACED, FakeExchange, config_of, ticket_of

CONFIG = """
max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
GAUGES = "\n".join(
    f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}"}} 1' for kind in ("used", "max", "tokens_per")
)
FINAL = Streamed(None, True)


class FakeModel:
    """Keeps what is submitted; `answer` is the model's turn."""

    name = "m"
    version_text = "1"
    is_plain = True

    def __init__(self) -> None:
        self.signature = Signature(config_of(CONFIG), "m")
        self.forms: list[InferForm] = []
        self.refusal: RemoraError | None = None
        self.ticket = ticket_of()
        self._reply: Callable[[Ticket, Outcome], None] | None = None

    def submit(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Callable[[Ticket, Outcome], None],
        *,
        mailbox: Mailbox | None = None,
        context: object = None,
        timeout_ns: int = 0,
    ) -> Ticket:
        if self.refusal is not None:
            raise self.refusal
        self.forms.append(form)
        self._reply = reply
        self.ticket = ticket_of(id=form.id)
        return self.ticket

    def answer(self, *outcomes: Outcome) -> None:
        assert self._reply is not None
        for outcome in outcomes:
            self._reply(self.ticket, outcome)


class FakeEngine:
    """One model, and metrics."""

    traces = UNTRACED

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.metrics = ""

    def resolve(self, name: str, version: int = -1) -> FakeModel:
        if name != "m":
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return self.model

    submit_to = Engine.submit_to
    capture = None

    def perform(self, call: Metrics) -> str:
        return self.metrics


def _no_wait(*_: object) -> None:
    raise AssertionError("no model is being loaded")


class Asked:
    """One request to the fake model."""

    def __init__(self, path: str = "generate", body: bytes = b'{"IN":1}', model: str = "m", **headers: str) -> None:
        self.model = FakeModel()
        self.engine = FakeEngine(self.model)
        self.exchange = FakeExchange()
        self.routes = GenerateRoutes(self.engine, None, RequestLimits(), _no_wait)  # type: ignore[arg-type]
        self._path = f"/v2/models/{model}/{path}"
        self._body = body
        self._headers = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())

    def ask(self, encoding: bytes = b"") -> Ticket | None:
        head = Head("POST", self._path, self._headers)
        return self.routes.handle(route("POST", self._path), encoding, head, self._body, self.exchange)

    def whole(self) -> tuple[int, bytes]:
        """Status and body of the one answer."""
        (answer,) = self.exchange.answers
        assert not self.exchange.begun
        assert answer.headers[0] == (b"Content-Type", b"application/json")
        return answer.status, b"".join(bytes(piece) for piece in answer.body)

    def stream(self) -> tuple[int, list[bytes]]:
        """Status and events of the one stream, which has ended."""
        ((status, headers),) = self.exchange.begun
        assert headers[0] == (b"Content-Type", EVENTS)
        assert self.exchange.finished == 1
        assert not self.exchange.answers
        return status, self.exchange.pieces


def response(value: int) -> Response:
    return Response([Tensor("OUT", "INT32", np.array([value], np.int32))])


def body(value: int) -> bytes:
    return b'{"OUT":%d,"model_name":"m","model_version":"1"}' % value


def more(value: int) -> Streamed:
    return Streamed(response(value), False)


NOT_ONE = b'{"error":"%b"}' % NOT_ONE_RESPONSE.encode()
FAILED = b'{"error":"failed as asked"}'
ERROR = NotFoundError("failed as asked")


@pytest.mark.parametrize(
    ("outcomes", "status", "expected"),
    [
        ([response(1)], 200, body(1)),
        ([ERROR], 400, FAILED),
        ([UnavailableError("failed as asked")], 400, FAILED),
        ([InternalError("failed as asked", from_model=True)], 400, FAILED),
        ([more(1), FINAL], 200, body(1)),
        ([Streamed(response(1), True)], 200, body(1)),
        ([FINAL], 200, NOT_ONE),
        ([more(1), more(2), FINAL], 200, NOT_ONE),
        ([more(1), Streamed(response(2), True)], 200, NOT_ONE),
        ([more(1), Streamed(ERROR, False), FINAL], 200, NOT_ONE),
        ([Streamed(ERROR, False), FINAL], 400, FAILED),
        ([Streamed(ERROR, False), more(1), FINAL], 400, NOT_ONE),
    ],
)
def test_generate_wants_one_response_and_takes_its_status_from_the_first(
    outcomes: list[Outcome], status: int, expected: bytes
) -> None:
    asked = Asked()
    assert asked.ask() is asked.model.ticket
    asked.model.answer(*outcomes)
    assert asked.whole() == (status, expected)


def test_generate_waits_until_the_model_says_that_no_more_come() -> None:
    asked = Asked()
    asked.ask()
    asked.model.answer(more(1))
    assert not asked.exchange.answers


def test_a_second_response_settles_generate_and_stops_the_model() -> None:
    asked = Asked()
    asked.ask()
    asked.model.answer(more(1), more(2))
    assert asked.whole() == (200, NOT_ONE)
    assert asked.model.ticket.request.cancelled


@pytest.mark.parametrize(
    ("outcomes", "status", "payloads"),
    [
        ([response(1)], 200, [body(1)]),
        ([ERROR], 400, [FAILED]),
        ([FINAL], 200, []),
        ([more(1), more(2), FINAL], 200, [body(1), body(2)]),
        ([more(1), Streamed(response(2), True)], 200, [body(1), body(2)]),
        ([more(1), Streamed(ERROR, False), more(3), FINAL], 200, [body(1), FAILED, body(3)]),
        ([Streamed(ERROR, False), more(2), FINAL], 400, [FAILED, body(2)]),
        ([more(1), Streamed(ERROR, True)], 200, [body(1), FAILED]),
    ],
)
def test_generate_stream_makes_an_event_of_each_response(
    outcomes: list[Outcome], status: int, payloads: list[bytes]
) -> None:
    asked = Asked("generate_stream")
    asked.ask()
    asked.model.answer(*outcomes)
    assert asked.stream() == (status, [b"data: " + payload + b"\n\n" for payload in payloads])


def test_events_behind_a_large_one_wait_until_a_thread_has_printed_it() -> None:
    async def play() -> None:
        asked = Asked("generate_stream")
        large = LargeBodies(asyncio.get_running_loop())
        asked.routes = GenerateRoutes(asked.engine, None, RequestLimits(), _no_wait, large=large)  # type: ignore[arg-type]
        asked.ask()
        big = Response([Tensor("OUT", "INT32", np.full(LARGE_BYTES, 7, np.int32))])
        asked.model.answer(more(1), Streamed(big, False), more(2), Streamed(big, False), Streamed(response(3), True))
        assert len(asked.exchange.pieces) == 1  # the thread answers in a later turn of the loop
        while not asked.exchange.finished:
            await asyncio.sleep(0)
        status, events = asked.stream()
        assert status == 200
        small = [b"data: " + body(value) + b"\n\n" for value in (1, 2, 3)]
        assert [events[at] for at in (0, 2, 4)] == small
        assert events[1] == events[3]
        assert events[1].count(b"7") == LARGE_BYTES

    asyncio.run(asyncio.wait_for(play(), 60.0))


def test_an_event_is_sent_when_its_response_comes() -> None:
    asked = Asked("generate_stream")
    asked.ask()
    assert not asked.exchange.begun
    asked.model.answer(more(1))
    assert asked.exchange.pieces == [b"data: " + body(1) + b"\n\n"]
    assert not asked.exchange.finished


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_an_output_that_json_cannot_carry_is_an_error_in_the_responses_place(path: str) -> None:
    asked = Asked(path)
    asked.ask()
    asked.model.answer(Response([Tensor("H", "FP16", np.array([1], np.float16))]))
    text = b'{"error":"sending FP16 data via JSON is not supported. Please use the binary data format for output"}'
    if path == "generate":
        assert asked.whole() == (400, text)
    else:
        assert asked.stream() == (400, [b"data: " + text + b"\n\n"])


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "request_body", "encoding", "status", "text"),
    [
        ("nope", b"{bad", b"gzip", 404, "Request for unknown model: 'nope' is not found"),
        ("m", b"{bad", b"gzip", 400, "Unsupported content-encoding, only 'identity' is supported."),
        ("m", b"{bad", b"", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        ("m", b'{"IN":[1,2]}', b"", 400, "The schema can not convert input 'IN' to tensor with proper shape"),
    ],
)
def test_what_cannot_be_run_is_refused_as_json(
    path: str, model: str, request_body: bytes, encoding: bytes, status: int, text: str
) -> None:
    asked = Asked(path, request_body, model)
    assert asked.ask(encoding) is None
    assert asked.whole() == (status, b'{"error":"%b"}' % text.encode())


def test_what_the_model_does_not_take_is_refused_with_the_errors_own_status() -> None:
    asked = Asked("generate_stream")
    asked.model.refusal = UnavailableError("Exceeds maximum queue size")
    assert asked.ask() is None
    assert asked.whole() == (503, b'{"error":"Exceeds maximum queue size"}')


def test_a_request_that_expired_is_unavailable_whatever_the_rule_for_errors() -> None:
    asked = Asked(body=b'{"IN":1,"id":"r"}')
    asked.ask()
    asked.model.answer(expired_error(asked.model.ticket))
    assert asked.whole() == (503, b'{"error":"[request id: r] Request timeout expired"}')


def test_the_load_is_reported_to_those_who_ask_when_it_is_known() -> None:
    asked = Asked(endpoint_load_metrics_format="text")
    asked.ask()
    asked.engine.metrics = GAUGES
    asked.model.answer(response(1))
    report = b"TEXT named_metrics.kv_cache_utilization=1.000000, named_metrics.max_token_capacity=1"
    assert asked.exchange.answers[0].headers[1:] == ((b"endpoint-load-metrics", report),)


def test_a_load_that_is_not_known_is_left_out() -> None:
    asked = Asked("generate_stream", endpoint_load_metrics_format="json")
    asked.ask()
    asked.model.answer(response(1))
    assert asked.exchange.begun[0][1] == ((b"Content-Type", EVENTS),)
