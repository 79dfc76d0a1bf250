"""Cancellation of calls between models."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from remora import Engine
from remora.backends.calling import executing
from remora.errors import CancelledError
from remora.messages import InferForm, InputSpec, Outcome, Request, Response, Streamed, Ticket
from remora.models.calls import Caller
from support.models.calling_models import WAIT_S, Repository, told
from support.process.eventually import eventually

PATIENT = """
    def execute(self, requests):
        import time
        (self.folder / "started").touch()
        end = time.monotonic() + 60
        while not requests[0].is_cancelled() and time.monotonic() < end:
            time.sleep(0.002)
        (self.folder / f"cancelled {requests[0].is_cancelled()}").touch()
        return [answer(values(requests[0]))]

    def initialize(self, args):
        import pathlib
        self.folder = pathlib.Path(args["model_repository"])
"""
RELAY = "    def execute(self, requests):\n        return [ask('patient', values(requests[0])).exec()]\n"


def submitted(engine: Engine, model: str) -> tuple[Ticket, Callable[[], Outcome]]:
    done, outcomes = threading.Event(), list[Outcome]()

    def reply(_: Ticket, outcome: Outcome) -> None:
        outcomes.append(outcome)
        if not isinstance(outcome, Streamed) or outcome.final:
            done.set()

    form = InferForm((InputSpec("IN", "INT32", (1,)),))
    ticket = engine.resolve(model).submit(form, [np.zeros(1, np.int32)], reply)

    def outcome() -> Outcome:
        assert done.wait(WAIT_S)
        return outcomes[-1]

    return ticket, outcome


def test_cancelling_a_request_cancels_the_calls_that_are_made_for_it(repository: Repository) -> None:
    repository.model("patient", PATIENT)
    repository.model("relay", RELAY)
    repository.model("outer", RELAY.replace("patient", "relay"))
    engine = repository.serve()
    ticket, outcome = submitted(engine, "outer")
    eventually((repository.root / "patient" / "started").exists)
    ticket.cancel()
    outcome()
    eventually((repository.root / "patient" / "cancelled True").exists)


def test_a_call_for_several_requests_goes_on_while_one_of_them_is_wanted() -> None:
    requests = [Request(InferForm(()), {}, (), 1, None) for _ in range(3)]
    child = Ticket(Request(InferForm(()), {}, (), 1, None), lambda ticket, outcome: None)
    caller = Caller(lambda outcome: None)
    caller.follow(child, executing(requests[:2]))
    requests[0].cancel()
    assert not child.request.cancelled
    requests[1].cancel()
    assert child.request.cancelled
    late = Ticket(Request(InferForm(()), {}, (), 1, None), lambda ticket, outcome: None)
    caller = Caller(lambda outcome: None)
    caller.follow(late, executing(requests[:2]))
    assert late.request.cancelled, "a call for requests that are cancelled already"
    caller.reply(late, Response([]))
    assert len(requests[0]._watchers) == 1, "that of the first call, which has no answer yet"


STREAM = """
    def execute(self, requests):
        import time
        sender, end = requests[0].get_response_sender(), time.monotonic() + 60
        while not sender.is_cancelled() and time.monotonic() < end:
            sender.send(answer(values(requests[0])))
            time.sleep(0.002)
        (self.folder / f"cancelled {sender.is_cancelled()}").touch()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def initialize(self, args):
        import pathlib
        self.folder = pathlib.Path(args["model_repository"])
"""


@pytest.mark.parametrize("how", ["answers.cancel()", "del answers"])
def test_an_iterator_that_is_cancelled_or_dropped_stops_the_callee(repository: Repository, how: str) -> None:
    repository.model("stream", STREAM, more="model_transaction_policy { decoupled: true }")
    repository.teller(
        "asks",
        f"answers = ask('stream', values(request)).exec(decoupled=True)\nfirst = next(answers)\n{how}\nreturn 'done'",
    )
    assert told(repository.serve(), "asks") == "done"
    eventually((repository.root / "stream" / "cancelled True").exists)


def test_a_cancelled_iterator_still_comes_to_its_end(repository: Repository) -> None:
    repository.model("stream", STREAM, more="model_transaction_policy { decoupled: true }")
    repository.teller(
        "asks",
        "answers = ask('stream', values(request)).exec(decoupled=True)\nfirst = next(answers)\nanswers.cancel()\n"
        "return str(len(list(answers)) >= 0)",
    )
    assert told(repository.serve(), "asks") == "True"


def test_a_cancelled_queued_call_answers_with_the_cancellation(repository: Repository) -> None:
    repository.model("patient", PATIENT)
    engine = repository.serve()
    first, first_outcome = submitted(engine, "patient")
    eventually((repository.root / "patient" / "started").exists)
    second, second_outcome = submitted(engine, "patient")
    second.cancel()
    first.cancel()
    first_outcome()
    assert isinstance(second_outcome(), CancelledError)
