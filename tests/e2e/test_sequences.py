"""Sequences and the state that models leave to the server, end to end: ONNX and Python models, tritonclient."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunningServer, Serving

SUM = """
backend: "onnxruntime" max_batch_size: %d
input { name: "INPUT" data_type: TYPE_FP32 dims: 1 }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: 1 } %s
sequence_batching { max_sequence_idle_microseconds: 60000000 %s
  state { input_name: "SUM" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: 1 %s }
}
"""
FROM_FILE = 'initial_state { name: "hundred" data_type: TYPE_FP32 dims: 1 data_file: "hundred" }'
WARMUP = """
model_warmup { name: "a first request" inputs { key: "INPUT" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }
"""
LOG = """
backend: "onnxruntime" max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
output { name: "LENGTH" data_type: TYPE_INT64 dims: 1 reshape { shape: [ ] } }
output { name: "LOG_OUT" data_type: TYPE_INT32 dims: -1 }
sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  state { input_name: "LOG" output_name: "LOG_OUT" data_type: TYPE_INT32 dims: -1
    use_same_buffer_for_input_output: true use_growable_memory: true
    initial_state { name: "none" data_type: TYPE_INT32 dims: 2 zero_data: true } }
}
"""
PYTHON_CONFIG = """
backend: "python" max_batch_size: 4
input { name: "INPUT" data_type: TYPE_STRING dims: 1 }
output { name: "OUTPUT" data_type: TYPE_STRING dims: 1 }
sequence_batching { max_sequence_idle_microseconds: 60000000 %s
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  state { input_name: "WORDS" output_name: "WORDS_OUT" data_type: TYPE_STRING dims: -1 }
  state { input_name: "COUNT" output_name: "COUNT_OUT" data_type: TYPE_INT64 dims: 1 }
}
%s
"""
PYTHON_MODEL = '''
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Says all words of a sequence and how many there were; `forget` renews no state, `die` ends the process."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        word, words, count, ready = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "WORDS", "COUNT", "READY")
        )
        if not ready[0, 0]:
            assert not count.any() and not any(words[0])
        if word[0, 0] == b"die":
            os._exit(3)
        words = np.concatenate([words, word], axis=1)
        count += 1
        text = b" ".join(words[0]) + b" %d" % count[0, 0]
        outputs = [pb_utils.Tensor("OUTPUT", np.array([[text]], np.object_))]
        if word[0, 0] != b"forget":
            outputs += [pb_utils.Tensor("WORDS_OUT", words), pb_utils.Tensor("COUNT_OUT", count)]
        return pb_utils.InferenceResponse(outputs)
'''

Ask = Callable[..., Any]


def save_sum(folder: Path, config: str, shape: list[object]) -> None:
    """OUTPUT = SUM_OUT = INPUT + SUM."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Add", ["INPUT", "SUM"], ["OUTPUT"]),
        helper.make_node("Identity", ["OUTPUT"], ["SUM_OUT"]),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]
        for names in (("INPUT", "SUM"), ("OUTPUT", "SUM_OUT"))
    )
    save(folder, config, helper.make_graph(nodes, "sum", inputs, outputs))
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "hundred").write_bytes(np.array([100], np.float32).tobytes())


def save_log(folder: Path) -> None:
    """LOG_OUT = LOG with INPUT behind it, LENGTH how long it is; START is taken and does nothing."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Concat", ["LOG", "INPUT"], ["LOG_OUT"], axis=1),
        helper.make_node("Shape", ["LOG_OUT"], ["shape"]),
        helper.make_node("Slice", ["shape", "one", "two"], ["columns"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["rows"]),
        helper.make_node("Expand", ["columns", "rows"], ["LENGTH"]),
        helper.make_node("Identity", ["START"], ["unused"]),
    ]
    numbers = [
        helper.make_tensor(name, TensorProto.INT64, [1], [value]) for value, name in enumerate(("zero", "one", "two"))
    ]
    inputs = [
        helper.make_tensor_value_info("INPUT", TensorProto.INT32, ["n", 1]),
        helper.make_tensor_value_info("LOG", TensorProto.INT32, ["n", "m"]),
        helper.make_tensor_value_info("START", TensorProto.INT32, ["n", 1]),
    ]
    outputs = [
        helper.make_tensor_value_info("LOG_OUT", TensorProto.INT32, ["n", "k"]),
        helper.make_tensor_value_info("LENGTH", TensorProto.INT64, ["n"]),
    ]
    save(folder, LOG, helper.make_graph(nodes, "log", inputs, outputs, numbers))


def save(folder: Path, config: str, graph: Any) -> None:
    from onnx import helper
    from onnx import save as write

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    write(model, str(folder / "1" / "model.onnx"))


def save_python(folder: Path, strategy: str, rest: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(PYTHON_CONFIG % (strategy, rest))
    (folder / "1" / "model.py").write_text(PYTHON_MODEL)


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """ONNX and Python models of both strategies."""
    pytest.importorskip("onnx", reason="the models of this test are made with onnx: pip install '.[dev]'")
    repository = tmp_path_factory.mktemp("states")
    shown = 'output { name: "SUM_OUT" data_type: TYPE_FP32 dims: 1 }'
    save_sum(repository / "sum_direct", SUM % (4, "", "direct { }", ""), ["n", 1])
    save_sum(repository / "sum_oldest", SUM % (4, shown, "oldest { }", FROM_FILE), ["n", 1])
    save_sum(repository / "sum_alone", SUM % (0, "", "", FROM_FILE) + WARMUP, [1])
    save_log(repository / "log")
    save_python(repository / "words_direct", "direct { }")
    save_python(repository / "words_oldest", "oldest { max_candidate_sequences: 8 }")
    save_python(repository / "words_thread", "", 'parameters { key: "ISOLATION" value { string_value: "thread" } }')
    rpc = pytest.importorskip("grpc", reason="pip install '.[grpcio]'")
    with serving(repository) as running, rpc.insecure_channel(f"127.0.0.1:{running.grpc}") as channel:
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        assert ready(b"", timeout=60, wait_for_ready=True)
        yield running


@pytest.fixture(scope="module")
def ask(server: RunningServer) -> Iterator[Ask]:
    """Sends one request of a sequence over gRPC, from any thread."""
    grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]: pip install '.[dev]'")
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:

        def send(model: str, number: int | str, value: Any, datatype: str = "FP32", **flags: bool) -> Any:
            shape = (1,) if model == "sum_alone" else (1, 1)
            kinds = {"FP32": np.float32, "INT32": np.int32, "BYTES": np.object_}
            tensor = grpc.InferInput("INPUT", shape, datatype)
            tensor.set_data_from_numpy(np.full(shape, value, kinds[datatype]))
            names = {"start": "sequence_start", "end": "sequence_end"}
            return client.infer(
                model, [tensor], sequence_id=number, **{names[name]: flag for name, flag in flags.items()}
            )

        yield send


@pytest.mark.parametrize(("model", "begin"), [("sum_direct", 0), ("sum_oldest", 100), ("sum_alone", 100)])
def test_an_onnx_model_goes_on_with_the_state_that_it_left(ask: Ask, model: str, begin: int) -> None:
    for _ in range(2):  # START begins anew
        sums = [ask(model, 7, value, start=value == 1, end=value == 3).as_numpy("OUTPUT").item() for value in (1, 2, 3)]
        assert sums == [begin + 1, begin + 3, begin + 6]


def test_a_state_is_shown_only_where_it_is_declared(ask: Ask) -> None:
    outputs = {
        model: [row.name for row in ask(model, 8, 1, start=True, end=True).get_response().outputs]
        for model in ("sum_direct", "sum_oldest")
    }
    assert outputs == {"sum_direct": ["OUTPUT"], "sum_oldest": ["OUTPUT", "SUM_OUT"]}


@pytest.mark.parametrize("model", ["sum_direct", "sum_oldest"])
def test_many_sequences_at_once_do_not_mix_their_states(ask: Ask, model: str) -> None:
    begin = 100 if model == "sum_oldest" else 0

    def run(number: int) -> list[float]:
        return [
            ask(model, number, number, start=turn == 0, end=turn == 9).as_numpy("OUTPUT").item() for turn in range(10)
        ]

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(run, range(1, 25)))
    assert found == [[begin + number * turn for turn in range(1, 11)] for number in range(1, 25)]


def test_a_state_may_grow(ask: Ask) -> None:
    for turn in range(1, 6):
        answer = ask("log", 5, turn, "INT32", start=turn == 1, end=turn == 5)
        assert answer.as_numpy("LENGTH").tolist() == [[2 + turn]]
        assert answer.as_numpy("LOG_OUT").tolist() == [[0, 0, *range(1, turn + 1)]]


def test_states_of_unequal_lengths_wait_for_separate_batches(ask: Ask) -> None:
    def run(number: int) -> list[int]:
        answers = [ask("log", number, turn, "INT32", start=turn == 0, end=turn == number - 1) for turn in range(number)]
        return [answer.as_numpy("LENGTH").item() for answer in answers]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(1, 9))) == [[3 + turn for turn in range(number)] for number in range(1, 9)]


@pytest.mark.parametrize("model", ["words_direct", "words_oldest", "words_thread"])
def test_a_python_model_sees_its_state_as_tensors(ask: Ask, model: str) -> None:
    said = [
        ask(model, 3, word, "BYTES", start=word == "a", end=word == "c").as_numpy("OUTPUT").item()
        for word in ("a", "b", "forget", "c")
    ]
    assert said == [b" a 1", b" a b 2", b" a b forget 3", b" a b c 3"]


def test_a_state_outlives_the_process_that_made_it(ask: Ask) -> None:
    assert ask("words_direct", 9, "a", "BYTES", start=True).as_numpy("OUTPUT").item() == b" a 1"
    with pytest.raises(Exception, match="process"):
        ask("words_direct", 9, "die", "BYTES")
    assert ask("words_direct", 9, "b", "BYTES", end=True).as_numpy("OUTPUT").item() == b" a b 2"


def test_a_stream_over_grpc_carries_a_sequence_with_state(server: RunningServer) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]: pip install '.[dev]'")
    from queue import SimpleQueue

    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for value in (1, 2, 3):
            tensor = grpc.InferInput("INPUT", (1, 1), "FP32")
            tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
            client.async_stream_infer(
                "sum_direct", [tensor], sequence_id="text", sequence_start=value == 1, sequence_end=value == 3
            )
        found = [answers.get(timeout=60) for _ in range(3)]
        client.stop_stream()
    assert [error for _, error in found] == [None] * 3
    assert [result.as_numpy("OUTPUT").item() for result, _ in found] == [1, 3, 6]


def test_a_client_cannot_send_a_state(server: RunningServer) -> None:
    http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]: pip install '.[dev]'")
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        tensors = [http.InferInput(name, (1, 1), "FP32") for name in ("INPUT", "SUM")]
        for tensor in tensors:
            tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
        with pytest.raises(http.InferenceServerException, match="expected 1 inputs but got 2"):
            client.infer("sum_direct", tensors, sequence_id=4, sequence_start=True)


def read(server: RunningServer, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}{path}", timeout=60) as answer:
        return json.load(answer)


def test_the_sequences_page_tells_which_live_and_why_others_were_refused(server: RunningServer, ask: Ask) -> None:
    ask("words_oldest", 77, "a", "BYTES", start=True)
    with pytest.raises(Exception, match="must specify the START flag"):
        ask("words_oldest", 78, "a", "BYTES")
    found = read(server, "/v2/models/words_oldest/sequences")
    assert found == read(server, "/v2/models/words_oldest/versions/1/sequences") | {
        key: found[key] for key in ("sequences", "ended", "refused")
    }
    (row,) = [row for row in found["sequences"] if row["correlation_id"] == 77]
    assert (row["state"], row["instance"], row["running"]) == ("active", "words_oldest_0", False)
    assert found["refused"][0]["correlation_id"] == 78
    assert "is unknown" in found["refused"][0]["explanation"]
    assert "/v2/models/words_oldest/sequences" in read(server, "/v2/openapi.json")["paths"]
    ask("words_oldest", 77, "b", "BYTES", end=True)
    last = read(server, "/v2/models/words_oldest/sequences")
    assert last["sequences"] == []
    assert (last["ended"][0]["correlation_id"], last["ended"][0]["why"]) == (77, "done")
