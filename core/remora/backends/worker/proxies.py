"""Worker-side proxies for the server's log, metrics and other models.

A model sees the same interfaces as in a thread of the server.
"""

from __future__ import annotations

import itertools
import logging
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic_ns
from typing import Any, Protocol

from remora.backends.calling import ModelCall, Origin
from remora.backends.worker.encoding import error_from, index_of, outcome_from
from remora.backends.worker.logs import Budget
from remora.backends.worker.wire import Draft, Item, Message, MessageKind, WireError, head
from remora.custom_metrics import MetricError
from remora.custom_metrics import MetricKind as MetricKind
from remora.custom_metrics import Series as LocalSeries
from remora.errors import InternalError, RemoraError
from remora.messages import Array, Outcome, Request, Streamed, datatype_of

_LONGEST_TEXT = 1 << 16


class Sending(Protocol):
    """Interface for sending over a channel."""

    def send(
        self, kind: MessageKind, number: int = 0, items: Sequence[Draft] = (), *, wait_s: float | None = None
    ) -> bool: ...


class ServerRequests:
    """Requests to the server that wait for an answer.

    Another thread receives the answers.
    """

    def __init__(self, channel: Sending) -> None:
        self.channel = channel
        self.numbers = itertools.count(1)
        self._pending: dict[int, Future[Item]] = {}

    def request(self, kind: MessageKind, draft: Draft) -> Item:
        """Send a request and return the item of the answer.

        Raises RemoraError if the server refuses.
        """
        number = next(self.numbers)
        future: Future[Item] = Future()
        self._pending[number] = future
        self.channel.send(kind, number, [draft])
        return future.result()

    def handle_answer(self, message: Message) -> bool:
        """Pass an answer to its waiting thread, or return False if there is no such thread."""
        future = self._pending.pop(message.number, None)
        if future is None:
            return False
        error = error_from(message.items[0])
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(message.items[0])
        return True


class ServerLog(logging.Handler):
    """Log handler that sends records to the server.

    Records beyond the limit are dropped and counted.
    """

    def __init__(self, channel: Sending, request_ids: Callable[[], Sequence[str]]) -> None:
        super().__init__()
        self._channel = channel
        self._request_ids = request_ids
        self._budget = Budget()

    def emit(self, record: logging.LogRecord) -> None:
        now_ns = monotonic_ns()
        dropped = self._budget.take_dropped(now_ns)
        if dropped:
            self._send(logging.WARNING, f"{dropped} log lines of the model were dropped", record)
        if self._budget.grant(1, now_ns):
            text = record.getMessage()
            if record.exc_info and record.exc_info[0] is not None:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
            if not record.name.startswith("remora.model"):
                text = f"{record.name}: {text}"
            self._send(record.levelno, text[:_LONGEST_TEXT], record)

    def _send(self, level: int, text: str, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {
            "level": level,
            "text": text,
            "file": record.pathname,
            "line": record.lineno,
            "function": record.funcName,
            "requests": list(self._request_ids()),
        }
        try:
            self._channel.send(MessageKind.LOG, 0, [Draft(head(**fields))], wait_s=0.1)
        except Exception:  # because a log line must not fail the model
            self.handleError(record)


# -- metrics --------------------------------------------------------------------------------------------------------


class ServerMetrics:
    """Proxy for the server's registry of metrics, see ``custom_metrics.Registry``."""

    def __init__(self, requests: ServerRequests) -> None:
        self._requests = requests
        self._numbers = itertools.count(1)

    def claim(
        self, name: str, description: str, kind: MetricKind, *, holder: object, owner: object = None
    ) -> ServerClaim:
        """Create a family. Raises MetricError."""
        number = next(self._numbers)
        self._request(do="claim", number=number, name=name, description=description, kind=kind.value)
        channel = self._requests.channel
        forget = [Draft(head(do="forget", number=number))]
        weakref.finalize(holder, _try_to_send, channel, forget).atexit = False
        return ServerClaim(number, kind)

    def series(
        self, claim: ServerClaim, labels: Mapping[str, str], buckets: Sequence[float] | None = None
    ) -> ServerSeries:
        """Create a series. Raises MetricError."""
        number = next(self._numbers)
        bounds = None if buckets is None else [float(bound) for bound in buckets]
        self._request(do="series", number=number, claim=claim.number, labels=dict(labels), buckets=bounds)
        return ServerSeries(self, number, claim.kind)

    def retire(self, owner: object) -> None:
        """Do nothing, because the server removes the metrics when the worker ends."""

    def _request(self, **fields: Any) -> Any:
        try:
            draft = Draft(head(**fields))
        except TypeError as error:
            raise MetricError(str(error)) from None
        try:
            return self._requests.request(MessageKind.METRIC_CALL, draft).head.fields.get("value")
        except RemoraError as error:
            raise MetricError(str(error)) from None

    def change(self, do: str, number: int, value: float) -> None:
        """Update a series without waiting for an answer."""
        self._requests.channel.send(MessageKind.METRIC, 0, [Draft(head(do=do, number=number, value=float(value)))])

    def value(self, number: int) -> float:
        """Return the value of a series."""
        return float(self._request(do="value", number=number))


class ServerClaim:
    """Claim on a family in the server."""

    def __init__(self, number: int, kind: MetricKind) -> None:
        self.number = number
        self.kind = kind


class ServerSeries(LocalSeries):
    """Proxy for a series in the server.

    Operations that its kind does not support are refused here.
    """

    __slots__ = ("_metrics", "_number")

    def __init__(self, metrics: ServerMetrics, number: int, kind: MetricKind) -> None:
        super().__init__(kind, ())
        self._metrics = metrics
        self._number = number

    def increment(self, value: float) -> None:
        super().increment(value)
        self._metrics.change("increment", self._number, value)

    def set(self, value: float) -> None:
        super().set(value)
        self._metrics.change("set", self._number, value)

    def observe(self, value: float) -> None:
        super().observe(value)
        self._metrics.change("observe", self._number, value)

    def value(self) -> float:
        super().value()
        return self._metrics.value(self._number)


def _try_to_send(channel: Sending, items: Sequence[Draft]) -> None:
    """Send from a destructor, which may run anywhere.

    A failure is ignored, because the worker's end has the same effect.
    """
    try:
        channel.send(MessageKind.METRIC, 0, items, wait_s=0)
    except Exception:
        return


# -- other models ---------------------------------------------------------------------------------------------------


class ServerCalls:
    """Proxy for the engine, see ``calling.ModelCaller``.

    Args:
        requests: to the server.
        place_of: returns the execution number and index of a request that this worker is executing; None for others.
    """

    def __init__(self, requests: ServerRequests, place_of: Callable[[Request], tuple[int, int] | None]) -> None:
        self._requests = requests
        self._place_of = place_of
        self._replies: dict[int, Callable[[Outcome], None]] = {}

    def submit(self, call: ModelCall, reply: Callable[[Outcome], None], origin: Origin) -> Callable[[], None]:
        """Submit a call. Raises RemoraError.

        A refusal by the server arrives as the answer.
        """
        form = call.form
        number = next(self._requests.numbers)
        tensors = [(spec.name, spec.datatype, array.shape) for spec, array in zip(form.inputs, call.data, strict=True)]
        fields = {
            "model": call.model,
            "version": call.version,
            "decoupled": call.decoupled,
            "trace": call.trace,
            "outputs": [output.name for output in form.outputs],
            "parameters": dict(form.parameters),
            "priority": form.priority,
            "timeout_us": form.timeout_us,
            "sequence": [form.sequence_id, form.sequence_start, form.sequence_end],
            **self._origin(origin),
        }
        self._replies[number] = reply
        try:
            self._requests.channel.send(MessageKind.CALL, number, [Draft(head(tensors, **fields), call.data, form.id)])
        except BaseException as error:
            self._replies.pop(number, None)
            raise InternalError(f"the call of model '{call.model}' cannot be sent: {error}") from error
        return lambda: self._cancel(number)

    def _cancel(self, number: int) -> None:
        if number in self._replies:
            try:
                self._requests.channel.send(MessageKind.CALL_CANCEL, number, [Draft()], wait_s=0)
            except Exception:
                return

    def handle_answer(self, message: Message) -> None:
        """Pass an answer to its call. Does not wait. Raises WireError."""
        reply = self._replies.get(message.number)
        if reply is None:
            return
        for item in message.items:
            error = error_from(item)
            if message.kind is MessageKind.REFUSED:
                self._replies.pop(message.number, None)
                reply(error or InternalError("a call was refused without a reason"))
                return
            _, final = index_of(item)
            if final:
                self._replies.pop(message.number, None)
            outcome = outcome_from(item)
            if outcome is None and not final:
                raise WireError("an answer without content that is not the last one")
            reply(Streamed(outcome, final))

    def load(self, model: str, parameters: Mapping[str, str | bytes], origin: Origin) -> None:
        """Load or reload a model. Raises RemoraError."""
        import numpy as np

        texts = {name: value for name, value in parameters.items() if isinstance(value, str)}
        files: dict[str, Array] = {
            name: np.frombuffer(value, np.uint8) for name, value in parameters.items() if isinstance(value, bytes)
        }
        tensors = [(name, datatype_of(array), array.shape) for name, array in files.items()]
        fields = {"do": "load", "model": model, "texts": texts, **self._origin(origin)}
        self._requests.request(MessageKind.MODEL_CALL, Draft(head(tensors, **fields), list(files.values())))

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Take a model out of service. Raises RemoraError."""
        fields: dict[str, Any] = {"do": "unload", "model": model, "unload_dependents": unload_dependents}
        self._requests.request(MessageKind.MODEL_CALL, Draft(head(**fields)))

    def is_ready(self, model: str, version: int) -> bool:
        answer = self._requests.request(
            MessageKind.MODEL_CALL, Draft(head(do="is_ready", model=model, version=version))
        )
        return bool(answer.head.fields.get("value"))

    def _origin(self, origin: Origin) -> dict[str, object]:
        places = [self._place_of(request) for request in origin.requests]
        return {
            "requests": [list(place) for place in places if place is not None],
            "held": origin.holder is not None,
            "loading": sorted(origin.loading),
        }
