"""Ensembles of real models in an engine and in a server: ONNX and Python steps, streams, arrays passed on uncopied.

The Python models run in threads, so that a test can see by the address that an array was not copied.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import RunningServer, Serving
from remora.engine import Engine
from remora.errors import RemoraError
from remora.messages import InferForm, InputSpec, Outcome, Response, Streamed, Ticket

PATIENCE_S = 60.0

THREAD = 'parameters { key: "ISOLATION" value { string_value: "thread" } } instance_group { kind: KIND_CPU count: 1 }'
PYTHON = """
import numpy as np
import triton_python_backend_utils as pb


def address(array):
    return np.array([array.__array_interface__["data"][0]], np.int64)


class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor(*pair) for pair in self.answer(request)]) for request in requests]

    def answer(self, request):
        get = lambda name: pb.get_input_tensor_by_name(request, name).as_numpy()
        %s
"""
SOURCE = "made = get('IN') + 1; return [('OUT', made), ('AT', address(made))]"
SINK = "got = get('IN'); return [('OUT', got), ('AT', address(got)), ('WRITABLE', np.array([got.flags.writeable]))]"
SCRIBBLE = "got = get('IN'); made = got * 1; got[:] = 99; return [('OUT', made)]"
FAIL = "raise pb.TritonModelException('the step is unwell')"
COUNT = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb.get_input_tensor_by_name(request, "IN").as_numpy()[0])):
                sender.send(pb.InferenceResponse([pb.Tensor("OUT", np.array([number], np.float32))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def tensors(kind: str, *rows: str) -> str:
    """Rows such as ``"IN FP32 -1"``."""
    return " ".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: {dims} }}'
        for name, datatype, dims in (row.split() for row in rows)
    )


def python(repository: Path, name: str, code: str, *outputs: str, more: str = "") -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code if "class" in code else PYTHON % code)
    rows = tensors("input", "IN FP32 -1") + tensors("output", "OUT FP32 -1", *outputs)
    (folder / "config.pbtxt").write_text(f'backend: "python" {rows} {THREAD} {more}')


def ensemble(repository: Path, name: str, outputs: tuple[str, ...], *steps: str) -> None:
    """Steps such as ``"source IN=IN OUT=x,AT=made_at"``."""
    texts = []
    for step in steps:
        model, *sides = step.split()
        maps = [
            f'{kind} {{ key: "{pair.split("=")[0]}" value: "{pair.split("=")[1]}" }}'
            for kind, side in zip(("input_map", "output_map"), sides, strict=True)
            for pair in side.split(",")
        ]
        texts.append(f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}')
    (repository / name / "1").mkdir(parents=True)
    rows = tensors("input", "IN FP32 -1") + tensors("output", *outputs)
    text = f'platform: "ensemble" {rows} ensemble_scheduling {{ {" ".join(texts)} }}'
    (repository / name / "config.pbtxt").write_text(text)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python models, an ONNX one (y = -x), and the ensembles that join them."""
    onnx = pytest.importorskip("onnx", reason="the ONNX step is made with onnx: pip install '.[dev]'")
    pytest.importorskip("onnxruntime", reason="pip install '.[onnx]'")
    root = tmp_path_factory.mktemp("ensembles")
    python(root, "source", SOURCE, "AT INT64 1")
    python(root, "sink", SINK, "AT INT64 1", "WRITABLE BOOL 1")
    python(root, "fail", FAIL)
    python(root, "count", COUNT, more="model_transaction_policy { decoupled: true }")
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in ("IN", "OUT")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["IN"], ["OUT"])], "g", ends[:1], ends[1:])
    (root / "neg" / "1").mkdir(parents=True)
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        root / "neg" / "1" / "model.onnx",
    )
    rows = tensors("input", "IN FP32 -1") + tensors("output", "OUT FP32 -1")
    (root / "neg" / "config.pbtxt").write_text(f'backend: "onnxruntime" {rows}')
    python(root, "scribble", SCRIBBLE)
    addresses = ("OUT FP32 -1", "MADE_AT INT64 1", "GOT_AT INT64 1", "WRITABLE BOOL 1")
    last = "sink IN=x OUT=OUT,AT=GOT_AT,WRITABLE=WRITABLE"
    ensemble(root, "pass", addresses, "source IN=IN OUT=x,AT=MADE_AT", last)
    fork = ("source IN=IN OUT=x", "scribble IN=x OUT=y", "scribble IN=x OUT=z", "sum2 A=y,B=z OUT=OUT")
    ensemble(root, "fork", ("OUT FP32 -1", "x FP32 -1"), *fork)
    python(root, "sum2", "return [('OUT', get('A') + get('B'))]")
    rows = tensors("input", "A FP32 -1", "B FP32 -1") + tensors("output", "OUT FP32 -1")
    (root / "sum2" / "config.pbtxt").write_text(f'backend: "python" {rows} {THREAD}')
    ensemble(root, "mixed", ("OUT FP32 -1",), "neg IN=IN OUT=x", "source IN=x OUT=y", "neg IN=y OUT=OUT")
    ensemble(root, "unwell", ("OUT FP32 -1",), "neg IN=IN OUT=x", "fail IN=x OUT=OUT")
    ensemble(root, "counting", ("OUT FP32 -1",), "count IN=IN OUT=x", "neg IN=x OUT=OUT")
    return root


@pytest.fixture(scope="module")
def engine(repository: Path) -> Iterator[Engine]:
    with Engine(repository) as running:
        yield running


ROW = np.array([1, 2, 3], np.float32)


def test_a_step_reads_the_memory_that_the_one_before_wrote(engine: Engine) -> None:
    result = engine.infer("pass", {"IN": ROW})
    assert result["MADE_AT"] == result["GOT_AT"]
    assert result["WRITABLE"], "no other step reads it"
    assert result["OUT"].tolist() == [2, 3, 4]


def test_a_step_that_overwrites_its_input_changes_no_other_input(engine: Engine) -> None:
    result = engine.infer("fork", {"IN": ROW})
    assert result["OUT"].tolist() == [4, 6, 8]
    assert result["x"].tolist() == [2, 3, 4]


def test_onnx_and_python_steps_take_turns(engine: Engine) -> None:
    assert engine.infer("mixed", {"IN": ROW})["OUT"].tolist() == [0, 1, 2]


def test_many_requests_at_once_get_their_own_answers(engine: Engine) -> None:
    futures = [engine.infer_async("mixed", {"IN": ROW + number}) for number in range(200)]
    answers = [future.result(PATIENCE_S)["OUT"].tolist() for future in futures]
    assert answers == [[number, number + 1, number + 2] for number in range(200)]


def test_a_step_that_raises_ends_the_request_with_its_words(engine: Engine) -> None:
    with pytest.raises(RemoraError, match=r"in ensemble 'unwell', .*the step is unwell"):
        engine.infer("unwell", {"IN": ROW})


def test_a_decoupled_step_makes_a_stream_of_the_ensemble(engine: Engine) -> None:
    answers: list[Outcome] = []
    ended = threading.Event()

    def reply(_ticket: Ticket, outcome: Outcome) -> None:
        answers.append(outcome)
        if isinstance(outcome, Streamed) and outcome.final:
            ended.set()

    form = InferForm((InputSpec("IN", "FP32", (1,)),))
    engine.resolve("counting").submit(form, [np.array([4], np.float32)], reply)
    assert ended.wait(PATIENCE_S)
    values = [
        float(each.outcome.outputs[0].data[0])
        for each in answers
        if isinstance(each, Streamed) and isinstance(each.outcome, Response)
    ]
    assert values == [0, -1, -2, -3]


# -- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(serving: Serving, repository: Path) -> Iterator[RunningServer]:
    with serving(repository, "--model-control-mode=explicit", "--load-model=mixed") as running:
        yield running


def asked(server: RunningServer, method: str, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


REQUEST = {"id": "7", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


def test_an_ensemble_over_http_answers_again_and_again(server: RunningServer) -> None:
    for _ in range(20):  # the first run in threads, then quick steps in the event loop
        status, body = asked(server, "POST", "/v2/models/mixed/infer", REQUEST)
        assert status == 200, body
        assert json.loads(body) == {
            "id": "7",
            "model_name": "mixed",
            "model_version": "1",
            "parameters": {"sequence_id": 0, "sequence_start": False, "sequence_end": False},
            "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [2], "data": [0.0, 1.0]}],
        }


def test_an_ensemble_comes_and_goes_with_its_models_over_http(server: RunningServer) -> None:
    assert asked(server, "POST", "/v2/repository/models/unwell/load")[0] == 200
    assert asked(server, "GET", "/v2/models/fail/ready")[0] == 200
    status, body = asked(server, "POST", "/v2/models/unwell/infer", REQUEST)
    assert status >= 400
    assert json.loads(body)["error"].startswith("in ensemble 'unwell', ")
    gone = {"parameters": {"unload_dependents": True}}
    assert asked(server, "POST", "/v2/repository/models/unwell/unload", gone)[0] == 200
    assert asked(server, "GET", "/v2/models/fail/ready")[0] == 404
    assert asked(server, "GET", "/v2/models/neg/ready")[0] == 200, "another ensemble needs it"
