"""Streamed answers as an iterator, by itself and from a decoupled model through the whole engine."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from remora.calls import ModelStatistics
from remora.engine import Engine
from remora.errors import InvalidArgumentError, NotFoundError, RemoraError, UnavailableError, UnsupportedError
from remora.in_process import AnswerStream
from remora.messages import Outcome, Response, Streamed, Tensor
from support.engine.fakes import ticket_of

PATIENCE_S = 30.0


def response(value: int) -> Response:
    return Response([Tensor("OUT", "INT32", np.array([value], np.int32))])


class Bench:
    """A stream of numbers and the ticket whose answers it gives."""

    def __init__(self, ahead: int = 8) -> None:
        self.stream = AnswerStream[int](lambda response: int(response.outputs[0].data[0]), ahead)
        self.ticket = ticket_of(reply=self.stream.receiver())
        self.stream.follow(self.ticket)

    def send(self, outcome: Outcome) -> None:
        self.ticket.reply(self.ticket, outcome)


def test_answers_come_in_order_and_the_final_one_ends_the_iteration() -> None:
    bench = Bench()
    bench.send(Streamed(response(1), False))
    bench.send(Streamed(response(2), True))
    assert list(bench.stream) == [1, 2]
    assert list(bench.stream) == []
    assert not bench.ticket.request.cancelled


def test_an_empty_final_answer_is_not_an_item() -> None:
    bench = Bench()
    bench.send(Streamed(None, True))
    assert list(bench.stream) == []


def test_a_model_that_answers_once_gives_one_item() -> None:
    bench = Bench()
    bench.send(response(3))
    assert list(bench.stream) == [3]


def test_an_error_is_raised_and_what_comes_after_it_can_be_read() -> None:
    bench = Bench()
    bench.send(Streamed(NotFoundError("no"), False))
    bench.send(Streamed(response(1), True))
    with pytest.raises(NotFoundError):
        next(bench.stream)
    assert list(bench.stream) == [1]


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_who_stops_iterating_cancels_the_request(leave: str) -> None:
    bench = Bench()
    bench.send(Streamed(response(1), False))
    if leave == "with":
        with bench.stream as stream:
            assert next(stream) == 1
    elif leave == "close":
        bench.stream.close()
        assert list(bench.stream) == []
    else:
        del bench.stream
        gc.collect()
    assert bench.ticket.request.cancelled


def test_a_model_far_ahead_is_held_up_until_its_answers_are_read() -> None:
    bench = Bench(ahead=1)
    bench.send(Streamed(response(0), False))

    def send() -> None:
        for number in (1, 2, 3):
            bench.send(Streamed(response(number), number == 3))

    sender = threading.Thread(target=send)
    sender.start()
    assert sender.is_alive()
    assert list(bench.stream) == [0, 1, 2, 3]
    sender.join(PATIENCE_S)


def test_closing_lets_a_held_up_model_go_on() -> None:
    bench = Bench(ahead=1)
    bench.send(Streamed(response(0), False))
    sender = threading.Thread(target=lambda: bench.send(Streamed(response(1), False)))
    sender.start()
    bench.stream.close()
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


# -- Through the engine ---------------------------------------------------------------------------------------------

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            index = 0
            while index < abs(count) and not request.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([index], np.int32))]))
                index += 1
            if count < 0:
                error = pb_utils.TritonError("enough", pb_utils.TritonError.UNAVAILABLE)
                sender.send(pb_utils.InferenceResponse([], error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    folder = tmp_path / "repeat"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL)
    (folder / "config.pbtxt").write_text(CONFIG)
    return Engine(tmp_path)


def test_an_engine_streams_the_answers_of_a_decoupled_model(engine: Engine) -> None:
    with engine:
        results = list(engine.infer_stream("repeat", {"IN": [3]}))
        assert [result["OUT"].tolist() for result in results] == [[0], [1], [2]]
        assert (results[0].model_name, results[0].model_version) == ("repeat", 1)
        assert list(engine.infer_stream("repeat", {"IN": [0]})) == []


def test_an_error_midway_is_raised_after_the_answers_before_it(engine: Engine) -> None:
    with engine:
        stream = engine.infer_stream("repeat", {"IN": [-1]})
        assert next(stream)["OUT"].tolist() == [0]
        with pytest.raises(UnavailableError, match="enough"):
            next(stream)
        assert list(stream) == []


def test_an_endless_model_stops_when_its_reader_leaves(engine: Engine) -> None:
    with engine:
        with engine.infer_stream("repeat", {"IN": [2**31 - 1]}) as stream:
            assert next(stream)["OUT"].tolist() == [0]
        assert len(list(engine.infer_stream("repeat", {"IN": [2]}))) == 2  # its one instance is free again


def test_a_request_that_does_not_fit_is_refused_at_once(engine: Engine) -> None:
    with engine, pytest.raises(InvalidArgumentError):
        engine.infer_stream("repeat", {})


def test_infer_names_infer_stream_for_a_decoupled_model(engine: Engine) -> None:
    with engine, pytest.raises(UnsupportedError, match="infer_stream"):
        engine.infer("repeat", {"IN": [1]})


def test_statistics_of_a_decoupled_python_model_are_as_tritons(engine: Engine) -> None:
    with engine:
        for count in (3, 0, -2):
            read_all(engine, count)
        read_all(engine, 1)  # when the one instance answers this, the executions before it are counted
        (stats,) = engine.perform(ModelStatistics("repeat"))
    assert stats.execution_count >= 3
    assert (stats.inference_count, stats.success.count, stats.fail.count) == (4, 4, 0)
    assert (stats.queue.count, stats.compute_infer.count) == (4, 4)
    assert stats.responses == {}


def read_all(engine: Engine, count: int) -> None:
    """All answers, errors too."""
    stream = engine.infer_stream("repeat", {"IN": [count]})
    try:
        list(stream)
    except RemoraError:
        list(stream)
