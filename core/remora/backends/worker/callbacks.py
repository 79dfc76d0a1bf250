"""Handler of a worker's callbacks to the server (log lines, metrics, calls of other models).

It runs in the thread that reads the worker's messages, so its methods never wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from remora.backends.calling import Busy, ModelCall, ModelCaller, Origin
from remora.backends.worker.connection import WorkerConnection
from remora.backends.worker.encoding import OutcomeWriter, error_head
from remora.backends.worker.logs import Budget
from remora.backends.worker.wire import FINAL, Draft, Item, Message, MessageKind, head
from remora.custom_metrics import REGISTRY, Claim, MetricError, Series
from remora.custom_metrics import MetricKind as MetricKind
from remora.errors import InternalError, InvalidArgumentError, RemoraError
from remora.messages import InferForm, InputSpec, Outcome, OutputSpec, Request


class WorkerCallbacks:
    """Handler of the callbacks of one instance's worker.

    Args:
        model: the model's name; its log lines go to the logger ``remora.model.<name>``.
        instance: the instance's name; may be set later.
        owner: identifies the instance in the origin of its calls.
        calls: returns the engine, for calls of other models; None without an engine.
        now_ns: clock for the log's budget.
    """

    def __init__(
        self,
        model: str,
        instance: str,
        owner: object,
        calls: Callable[[], ModelCaller] | None,
        now_ns: Callable[[], int],
    ) -> None:
        self.logger = logging.getLogger(f"remora.model.{model}")
        self.instance = instance
        self._owner = owner
        self._calls = calls
        self._now_ns = now_ns
        self._budget = Budget()
        self._metrics = _Metrics()
        self._cancels: dict[tuple[WorkerConnection, int], Callable[[], None]] = {}
        self._outcomes = OutcomeWriter()

    def run(self, connection: WorkerConnection, message: Message) -> None:
        """Run the callback in a message.

        Errors of the worker are answered or logged, never raised.
        """
        try:
            self._run(connection, message)
        except RemoraError as error:
            connection.post(MessageKind.REFUSED, message.number, [Draft(error_head(error))])
        except MetricError as error:
            connection.post(
                MessageKind.REFUSED, message.number, [Draft(head(error=["INVALID_ARG", str(error), True, False]))]
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            refusal = InternalError(f"the worker of '{self.instance}' sent an invalid callback: {error!r}")
            connection.post(MessageKind.REFUSED, message.number, [Draft(error_head(refusal))])

    def _run(self, connection: WorkerConnection, message: Message) -> None:
        item = message.items[0]
        fields = item.head.fields
        match message.kind:
            case MessageKind.LOG:
                self.log_record(connection, fields)
            case MessageKind.METRIC:
                self._metrics.change(fields)
            case MessageKind.METRIC_CALL:
                connection.post(MessageKind.ANSWER, message.number, [Draft(head(value=self._metrics.call(fields)))])
            case MessageKind.CALL:
                self._call(connection, message.number, item)
            case MessageKind.CALL_CANCEL:
                cancel = self._cancels.get((connection, message.number))
                if cancel is not None:
                    cancel()
            case MessageKind.MODEL_CALL:
                threading.Thread(
                    target=self._model_call,
                    args=(connection, message.number, item),
                    name="remora model call",
                    daemon=True,
                ).start()

    # -- log --------------------------------------------------------------------------------------------------------

    def log_lines(self, level: int, lines: Sequence[str], request_ids: Sequence[str]) -> None:
        """Log the output that the model has printed."""
        now_ns = self._now_ns()
        dropped = self._budget.take_dropped(now_ns)
        if dropped:
            self.logger.warning("%s: %d lines of the model's output were dropped", self.instance, dropped)
        for line in lines[: self._budget.grant(len(lines), now_ns)]:
            self._emit(level, f"{self.instance}: {line}", request_ids, "(output)", 0, "")

    def log_record(self, connection: WorkerConnection, fields: dict[str, Any]) -> None:
        """Log a record of the model's code.

        The worker has limited the rate already.
        """
        ids = fields["requests"] or connection.current
        self._emit(fields["level"], fields["text"], ids, fields["file"], fields["line"], fields["function"])

    def _emit(self, level: int, text: str, ids: Sequence[str], file: str, line: int, function: str) -> None:
        if not self.logger.isEnabledFor(level):
            return
        of = f" [request {', '.join(ids)}]" if ids else ""
        extra = {"request_id": ",".join(ids), "instance": self.instance}
        record = self.logger.makeRecord(self.logger.name, level, file, line, "%s%s", (text, of), None, function, extra)
        self.logger.handle(record)

    # -- calls of other models --------------------------------------------------------------------------------------

    def _call(self, connection: WorkerConnection, number: int, item: Item) -> None:
        fields = item.head.fields
        caller = self._caller()
        specs = tuple(InputSpec(tensor.name, tensor.datatype, tensor.shape) for tensor in item.head.tensors)
        sequence_id, start, end = fields["sequence"]
        form = InferForm(
            specs,
            tuple(OutputSpec(name) for name in fields["outputs"]),
            item.id,
            fields["parameters"],
            fields["priority"],
            fields["timeout_us"],
            sequence_id,
            start,
            end,
        )
        call = ModelCall(
            fields["model"], fields["version"], form, item.arrays, fields["decoupled"], fields.get("trace", 0)
        )
        key = (connection, number)
        self._cancels[key] = _no_cancel
        try:
            cancel = caller.submit(call, partial(self._answer, connection, number), self._origin(connection, fields))
        except RemoraError:
            self._cancels.pop(key, None)
            raise
        if key in self._cancels:  # otherwise the call is answered already
            self._cancels[key] = cancel

    def _answer(self, connection: WorkerConnection, number: int, outcome: Outcome) -> None:
        draft = self._outcomes.draft(outcome)
        final = bool(draft.flags & FINAL) or not isinstance(outcome, tuple)
        if final:
            self._cancels.pop((connection, number), None)
        connection.post(MessageKind.CALL_STREAMED, number, [draft._replace(flags=FINAL if final else 0)])

    def _origin(self, connection: WorkerConnection, fields: dict[str, Any]) -> Origin:
        requests: list[Request] = []
        for number, index in fields["requests"]:
            requests += connection.requests_of(number)[index : index + 1]
        busy = Busy(self._owner) if fields["held"] else None
        return Origin(tuple(requests), busy, frozenset(fields["loading"]))

    def _caller(self) -> ModelCaller:
        if self._calls is None:
            raise InvalidArgumentError("calls of other models are not offered here")
        return self._calls()

    def _model_call(self, connection: WorkerConnection, number: int, item: Item) -> None:
        try:
            connection.post(MessageKind.ANSWER, number, [Draft(head(value=self._control(connection, item)))])
        except RemoraError as error:
            connection.post(MessageKind.REFUSED, number, [Draft(error_head(error))])
        except Exception as error:
            refusal = InternalError(f"{type(error).__name__}: {error}")
            connection.post(MessageKind.REFUSED, number, [Draft(error_head(refusal))])

    def _control(self, connection: WorkerConnection, item: Item) -> bool | None:
        fields = item.head.fields
        caller = self._caller()
        if fields["do"] == "is_ready":
            return caller.is_ready(fields["model"], fields["version"])
        if fields["do"] == "unload":
            caller.unload(fields["model"], unload_dependents=fields["unload_dependents"])
            return None
        parameters: dict[str, str | bytes] = dict(fields["texts"])
        for tensor, array in zip(item.head.tensors, item.arrays, strict=True):
            parameters[tensor.name] = array.tobytes()
        caller.load(fields["model"], parameters, self._origin(connection, fields))
        return None

    # -- the end ----------------------------------------------------------------------------------------------------

    def forget(self, connection: WorkerConnection) -> None:
        """Cancel the calls and remove the metrics of a worker that has ended."""
        for key in [key for key in self._cancels if key[0] is connection]:
            cancel = self._cancels.pop(key, None)
            if cancel is not None:
                cancel()
        self._metrics.retire()


def _no_cancel() -> None:
    """Stand in for a call's cancel function while the call is being submitted."""


class _Metrics:
    """Metrics of one worker in the server's registry.

    The worker chooses the numbers of claims and series.
    """

    def __init__(self) -> None:
        self._claims: dict[int, tuple[_Holder, Claim]] = {}
        self._series: dict[int, Series] = {}

    def call(self, fields: dict[str, Any]) -> float | None:
        """Create a family or a series, or read a value. Raises MetricError."""
        number = fields["number"]
        match fields["do"]:
            case "claim":
                holder = _Holder()
                claim = REGISTRY.claim(
                    fields["name"], fields["description"], MetricKind(fields["kind"]), holder=holder, owner=self
                )
                self._claims[number] = (holder, claim)
            case "series":
                claim = self._claims[fields["claim"]][1]
                self._series[number] = REGISTRY.series(claim, fields["labels"], fields["buckets"])
            case "value":
                return self._series[number].value()
        return None

    def change(self, fields: dict[str, Any]) -> None:
        """Update a series or release a family, without an answer."""
        if fields["do"] == "forget":
            self._claims.pop(fields["number"], None)
            return
        series = self._series[fields["number"]]
        {"increment": series.increment, "set": series.set, "observe": series.observe}[fields["do"]](fields["value"])

    def retire(self) -> None:
        REGISTRY.retire(self)
        self._claims.clear()
        self._series.clear()


class _Holder:
    """Object that keeps a family exported as long as the model's own object exists."""

    __slots__ = ("__weakref__",)
