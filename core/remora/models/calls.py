"""Engine interface for the code of models, as in group L of docs/behaviours.md.

A call takes the same path as a client's request and is refused if it would wait for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from remora.backends.calling import ModelCall, Origin, calling_from
from remora.errors import InternalError, NotFoundError, RemoraError, UnavailableError
from remora.messages import Outcome, Streamed, Ticket
from remora.models.call_circles import Wait, Waits
from remora.models.lifecycle import Lifecycle
from remora.models.served_model import ServedModel
from remora.scheduling.delivery import run_replies
from remora.tracing.tracer import Traces


class ModelCalls:
    """Implementation of ``ModelCaller`` over the model lifecycle.

    Args:
        lifecycle: looks up, loads and unloads models.
        traces: follows calls that name a traced request.
    """

    def __init__(self, lifecycle: Lifecycle, traces: Traces) -> None:
        self._lifecycle = lifecycle
        self._traces = traces
        self._lock = threading.Lock()
        self._waits = Waits()

    def submit(self, call: ModelCall, reply: Callable[[Outcome], None], origin: Origin) -> Callable[[], None]:
        """Submit a call (see ``ModelCaller.submit``).

        Raises InternalError, with Triton's prefix: no such version serves, a decoupled model was called for a single
        response, the call would wait for itself, or any reason for which a client's request is refused. Errors after
        submission keep their code.
        """
        try:
            return self._submit(call, reply, origin)
        except RemoraError as error:
            raise InternalError(f"Model {call.model} - Error when running inference: {error}") from error

    def _submit(self, call: ModelCall, reply: Callable[[Outcome], None], origin: Origin) -> Callable[[], None]:
        served = self._acquire(call)
        model = self._traces.wrap_child(call.trace, served) if call.trace else served
        wait = Wait(origin.holder, origin.requests, served)
        caller = Caller(reply, lambda: self._end(wait))
        try:
            self._admit(wait, served)
            ticket = model.submit(
                call.form, call.data, caller.reply, mailbox=caller, blocking_instances=origin.blocking_instances
            )
        except BaseException:
            self._end(wait)
            raise
        finally:
            served.release()  # a queued request runs even if the model is unloaded now
        wait.ticket = ticket
        caller.follow(ticket, origin)
        caller.run()
        return ticket.cancel

    def _admit(self, wait: Wait, served: ServedModel) -> None:
        """Raise InternalError if only instances that wait for this call could answer it."""
        if not served.instances or not wait.requests:
            return  # an ensemble, whose steps are checked separately, or a call that no request waits for
        with self._lock:
            admitted = self._waits.admit(wait)
        if not admitted:
            count = len(served.instances)
            raise InternalError(
                f"model '{served.name}' would wait for itself: its {count} instance{'s are' if count > 1 else ' is'} "
                "busy with requests that wait for this call, or for calls that wait in turn. Let models call each "
                "other without a circle, or give the model more instances (instance_group count)"
            )

    def _end(self, wait: Wait) -> None:
        with self._lock:
            self._waits.end(wait)

    def _acquire(self, call: ModelCall) -> ServedModel:
        try:
            self._lifecycle.wait_for(call.model, call.version)  # an on-demand model may have to be loaded
            served = self._lifecycle.acquire(call.model, call.version)
        except RemoraError as error:
            raise NotFoundError(
                f"Failed for execute the inference request. Model '{call.model}' is not ready."
            ) from error
        if served.decoupled and not call.decoupled:
            served.release()
            raise InternalError(
                f"Model {call.model} is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.'"
            )
        return served

    def load(self, model: str, parameters: Mapping[str, str | bytes], origin: Origin) -> None:
        """Load or reload a model (see ``ModelCaller.load``)."""
        if model in origin.loading:
            raise UnavailableError(
                f"model '{model}' is being loaded and waits for the code that requests this load: a model cannot load "
                "itself, or one that is loading it, before its initialize has returned"
            )
        with calling_from(origin):
            self._lifecycle.load(model, parameters)

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Unload a model (see ``ModelCaller.unload``)."""
        self._lifecycle.unload(model, unload_dependents=unload_dependents)

    def is_ready(self, model: str, version: int) -> bool:
        try:
            return self._lifecycle.resolve(model, version).says_ready()
        except RemoraError:
            return False


class Caller:
    """A call in flight.

    It holds the mailbox of its responses, and its link to the requests for which it was made. The calling thread only
    waits, so it runs a quick model itself, which saves two thread switches. It does so only once, because later work
    may belong to other requests.
    """

    watcher = None

    def __init__(self, reply: Callable[[Outcome], None], ended: Callable[[], None] = lambda: None) -> None:
        self._reply = reply
        self._end = ended
        self._work: Callable[[], None] | None = None
        self._may_defer = True
        self._ties: list[Callable[[], None]] = []
        self._ended = False

    def defer(self, work: Callable[[], None]) -> bool:
        if not self._may_defer:
            return False
        self._may_defer = False
        self._work = work
        return True

    def run(self) -> None:
        """Run the deferred work in the calling thread."""
        self._may_defer = False
        if self._work is not None:
            self._work()
            self._work = None

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        run_replies(deliveries)

    def reply(self, ticket: Ticket, outcome: Outcome) -> None:
        if not isinstance(outcome, Streamed) or outcome.final:
            self._ended = True
            self._untie()
            self._end()
        self._reply(outcome)

    def follow(self, ticket: Ticket, origin: Origin) -> None:
        """Cancel the call when all requests for which it was made are cancelled."""
        requests = origin.requests

        def look() -> None:
            if all(request.cancelled for request in requests):
                ticket.cancel()

        self._ties = [request.when_cancelled(look) for request in requests]
        if self._ended:  # the response arrived first
            self._untie()

    def _untie(self) -> None:
        for untie in self._ties:
            untie()
