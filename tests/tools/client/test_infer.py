"""`remora infer` in this process, and the V2 bytes it sends and reads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from remora.calls import ModelInfo
from remora.cli import main
from remora.errors import MalformedError
from remora.messages import DTYPES, InferForm, Response, Tensor
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.response import ReplyFormat
from remora_tools.client.infer import decode_reply, encode_request, read_metadata
from remora_tools.client.inputs import InferRequest

Captured = pytest.CaptureFixture[str]
Ran = tuple[int, str, str]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`add` adds FP32 [-1, 3] inputs a and b; `words` repeats text; `stray` cannot be loaded."""
    onnx = pytest.importorskip("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    root = tmp_path_factory.mktemp("models")

    def save(name: str, node: Any, inputs: list[str], kind: int, shape: list[Any]) -> None:
        infos = {each: helper.make_tensor_value_info(each, kind, shape) for each in (*inputs, "y")}
        graph = helper.make_graph([node], name, [infos[each] for each in inputs], [infos["y"]])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (root / name / "1").mkdir(parents=True)
        onnx.save(model, str(root / name / "1" / "model.onnx"))

    save("add", helper.make_node("Add", ["a", "b"], ["y"]), ["a", "b"], kinds.FLOAT, ["N", 3])
    save("words", helper.make_node("Identity", ["x"], ["y"]), ["x"], kinds.STRING, ["N"])
    (root / "stray" / "1").mkdir(parents=True)
    (root / "stray" / "1" / "model.onnx").write_bytes(b"no model")
    return root


@pytest.fixture
def run(repository: Path, capsys: Captured) -> Any:
    """The command in this process: exit code, stdout, stderr."""
    pytest.importorskip("onnxruntime")

    def run(model: str, *arguments: str) -> Ran:
        code = main(["infer", model, "--repository", str(repository), *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_answer_is_a_short_table_with_the_time(run: Any) -> None:
    code, out, err = run("add", "--input", "a=1,2,3", "--input", "b=10,20,30")
    assert (code, err) == (0, "")
    first, headings, row = out.splitlines()
    assert first.startswith("add version 1: ")
    assert first.endswith(" ms")
    assert headings.split() == ["output", "datatype", "shape", "first", "values"]
    assert row.split(maxsplit=2) == ["y", "FP32", "[1, 3]  [11, 22, 33]"]


def test_made_up_inputs_fill_what_is_not_given(run: Any) -> None:
    _, out, _ = run("add", "--random", "--input", "a=0,0,0", "--json-out")
    once = json.loads(out)["outputs"][0]
    assert once["shape"] == [1, 3]
    assert all(0 <= value < 1 for value in once["data"])


def test_a_long_output_shows_its_first_values(run: Any) -> None:
    _, out, _ = run("add", "--random", "--shape", "a=4x3", "--shape", "b=4x3")
    assert out.rstrip().endswith(", ...]")
    assert "[4, 3]" in out


def test_all_values_come_as_json(run: Any) -> None:
    code, out, _ = run("add", "--input", "a=1,2,inf", "--input", "b=1,-2.5,0", "--json-out", "--repeat", "3")
    answer = json.loads(out)
    assert code == 0
    assert len(answer.pop("times_ms")) == 3
    assert answer == {
        "model_name": "add",
        "model_version": "1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [2.0, -0.5, "Infinity"]}],
    }


def test_repeats_are_reported_by_their_spread(run: Any) -> None:
    _, out, _ = run("add", "--random", "--repeat", "5")
    assert "5 requests, median " in out
    assert all(word in out for word in ("min ", "p99 ", "max "))


def test_arrays_come_from_files(run: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.ones((2, 3), np.float64))
    code, out, _ = run("add", "--npy", f"a={tmp_path / 'a.npy'}", "--npy", f"b={tmp_path / 'b.npy'}", "--json-out")
    assert code == 0
    assert json.loads(out)["outputs"][0]["data"] == [2.0] * 6


def test_a_document_comes_from_a_file_or_standard_input(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"a": [[1, 2, 3]], "b": [[1, 1, 1]]}
    row = {"datatype": "FP32", "shape": [1, 3]}
    request = {
        "id": "mine",
        "inputs": [{"name": "a", **row, "data": [1, 2, 3]}, {"name": "b", **row, "data": [[1, 1, 1]]}],
        "outputs": [{"name": "y"}],
    }
    file = tmp_path / "request.json"
    for document in (plain, request):
        file.write_text(json.dumps(document))
        _, from_file, _ = run("add", "--json", str(file), "--json-out")
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(document)))
        _, from_stdin, _ = run("add", "--json", "-", "--json-out")
        for out in (from_file, from_stdin):
            answer = json.loads(out)
            assert answer["outputs"][0]["data"] == [2.0, 3.0, 4.0]
            assert answer.get("id", "") == document.get("id", "")


def test_text_goes_in_and_out(run: Any) -> None:
    code, out, _ = run("words", "--input", f'x=["a", "zwölf", "{"l" * 50}"]')
    assert code == 0
    assert '["a", "zwölf", "' + "l" * 40 + '..."]' in out


def test_classes_are_asked_of_every_output(run: Any) -> None:
    code, out, _ = run("add", "--input", "a=1,5,3", "--input", "b=0,0,0", "--classes", "2")
    assert code == 0
    assert '["5.000000:1", "3.000000:2"]' in out


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("none", ("--random",), "no folder of that name"),
        ("no/ne", ("--random",), "no"),
        ("stray", ("--random",), "cannot load"),
        ("add", ("--input", "a=1,2,3"), "expected 2 inputs but got 1"),
        ("add", ("--input", "a=1,2"), "cannot hold 2 values"),
        ("add", ("--input", "c=1"), "no input 'c'"),
        ("add", ("--random", "--output", "z"), "unexpected inference output 'z'"),
        ("add", ("--random", "--version", "9"), "version 9 is not found"),
        ("add", ("--random", "--shape", "a=1x4"), "unexpected shape for input 'a'"),
        ("add", ("--json", "missing.json"), "missing.json"),
        ("add", ("--npy", "a=missing.npy"), "missing.npy"),
    ],
)
def test_a_failure_ends_with_1_and_one_line(run: Any, model: str, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(model, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("remora infer: ")
    assert said in err
    assert err.count("\n") == 1


def test_files_that_are_something_else_are_named(run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"\xff{")
    assert f"{bad} is not JSON" in run("add", "--json", str(bad))[2]
    assert f"{bad} is not an .npy file" in run("add", "--npy", f"a={bad}")[2]
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    assert "o.npy is not an .npy file" in run("add", "--npy", f"a={tmp_path / 'o.npy'}")[2]
    np.savez(tmp_path / "two.npz", a=np.ones(1), b=np.ones(1))
    assert "holds several arrays" in run("add", "--npy", f"a={tmp_path / 'two.npz'}")[2]


def test_a_shape_for_an_input_that_is_not_sent_is_wrong_usage(run: Any) -> None:
    code, _, err = run("add", "--input", "a=1,2,3", "--shape", "b=1x3")
    assert code == 2
    assert "--shape b" in err


# -- the bytes --------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    name = draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8))
    if datatype == "BYTES":
        items = np.empty(int(np.prod(shape)), object)
        items[:] = [draw(st.binary(max_size=5)) for _ in range(items.size)]
        return Tensor(name, datatype, items.reshape(shape))
    return Tensor(name, datatype, np.arange(int(np.prod(shape))).astype(DTYPES[datatype]).reshape(shape))


def same(one: Tensor, other: Tensor) -> bool:
    return one[:2] == other[:2] and one.data.shape == other.data.shape and one.data.tolist() == other.data.tolist()


@given(
    st.lists(tensors(), max_size=3, unique_by=lambda tensor: tensor.name),
    st.booleans(),
    st.text(st.characters(codec="utf-8"), max_size=3),
)
def test_what_is_sent_is_what_the_server_reads(inputs: list[Tensor], named: bool, id: str) -> None:
    request = InferRequest(tuple(inputs), ("y",) if named else (), 3 if named else 0, id, {"k": 1})
    body, length = encode_request(request)
    form, data, reply = InferCodec().decode(body, b"%d" % length)
    assert [(spec.name, spec.datatype, spec.shape) for spec in form.inputs] == [
        (tensor.name, tensor.datatype, tensor.data.shape) for tensor in inputs
    ]
    assert form.id == id
    assert form.parameters == {"k": 1}
    assert [(row.name, row.classes) for row in form.outputs] == ([("y", 3)] if named else [])
    assert reply.all_binary
    for tensor, piece in zip(inputs, data, strict=True):
        if tensor.datatype != "BYTES":
            assert bytes(piece) == tensor.data.tobytes()  # type: ignore[arg-type]


@given(st.lists(tensors(), max_size=3, unique_by=lambda tensor: tensor.name), st.booleans())
def test_what_the_server_answers_is_what_is_read(outputs: list[Tensor], binary: bool) -> None:
    if not binary:
        outputs = [row for row in outputs if row.datatype not in ("FP16", "BF16", "BYTES")]
    response = Response(outputs, {"p": "q"})
    answer = InferCodec().encode("m", "2", InferForm(()), response, ReplyFormat.of(binary, {}))
    length = next((int(value) for key, value in answer.headers if key == b"Inference-Header-Content-Length"), None)
    reply = decode_reply(b"".join(answer.body), length)
    assert (reply.model, reply.version, reply.parameters) == ("m", "2", {"p": "q"})
    assert all(same(*pair) for pair in zip(outputs, reply.outputs, strict=True))


def answer_of(output: dict[str, Any], tail: bytes = b"") -> tuple[bytes, int]:
    header = json.dumps({"model_name": "m", "outputs": [output]}).encode()
    return header + tail, len(header)


WHOLE = {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}


@pytest.mark.parametrize(
    ("output", "tail"),
    [
        (WHOLE, b"123"),
        (WHOLE, b"12345"),
        (WHOLE | {"shape": [2]}, b"1234"),
        (WHOLE | {"shape": [-1]}, b"123"),
        (WHOLE | {"datatype": "FP8"}, b"1234"),
        (WHOLE | {"datatype": "BYTES"}, b"\x01\0\0\0"),
        (WHOLE | {"datatype": "BYTES", "parameters": {"binary_data_size": 2}}, b"\0\0"),
        (WHOLE | {"parameters": {"binary_data_size": -4}}, b""),
        (WHOLE | {"parameters": {"binary_data_size": "x"}}, b""),
        (WHOLE | {"parameters": []}, b"1234"),
        ({"name": "y", "datatype": "FP32", "shape": [2], "data": [1]}, b""),
        ({"name": "y", "datatype": "FP32", "shape": [1], "data": ["a"]}, b""),
        ({"name": "y", "datatype": "FP32"}, b""),
        ({}, b""),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(output: dict[str, Any], tail: bytes) -> None:
    with pytest.raises(MalformedError, match="answer cannot be read"):
        decode_reply(*answer_of(output, tail))


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b"{}", b"\xff", b'{"outputs":[1]}', b'{"outputs":3}'])
def test_an_answer_of_another_kind_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedError, match="answer cannot be read"):
        decode_reply(body, None)


def test_null_stands_for_what_a_server_leaves_out() -> None:
    document = {"name": "m", "versions": None, "platform": None, "inputs": [], "outputs": []}
    assert read_metadata(document) == ModelInfo("m", (), "", (), ())
    row = {"name": "y", "datatype": "INT32", "shape": [1], "data": [7], "parameters": None}
    reply = decode_reply(json.dumps({"outputs": [row], "parameters": None}).encode(), None)
    assert (reply.parameters, reply.outputs[0].data.tolist()) == ({}, [7])


@pytest.mark.parametrize("document", [None, [], {}, {"name": "m", "inputs": [], "outputs": [{}]}, {"name": "m"}])
def test_metadata_of_another_form_is_refused(document: object) -> None:
    with pytest.raises(MalformedError, match="is it a V2 server"):
        read_metadata(document)


FUNCTIONS = """
import dataclasses
import remora

@dataclasses.dataclass
class Even:
    number: int

    def __post_init__(self):
        if self.number % 2:
            raise ValueError("odd")

@remora.model
def count(messages: list[dict], more: int = 1) -> int:
    return len(messages)

@remora.model(batch=4)
def lines(rows: list[dict[str, int]]) -> list[int]:
    return [row["name"] for row in rows]

@remora.model
def strict(pair: Even) -> int:
    return pair.number

@remora.model
def lenient(text: str, pair: Even = Even(2)) -> int:
    return pair.number
"""


def test_generated_inputs_fit_the_hints_of_a_function(tmp_path: Path, capsys: Captured) -> None:
    app = tmp_path / "app.py"
    app.write_text(FUNCTIONS)
    for name, answer in (("count", 1), ("lines", 1), ("lenient", 2)):
        assert main(["infer", name, "--repository", str(app), "--random", "--json-out"]) == 0, capsys.readouterr()
        assert f"{answer}" in str(json.loads(capsys.readouterr().out)["outputs"][0]["data"])
    assert main(["infer", "strict", "--repository", str(app), "--random"]) == 1
    assert (
        "input 'pair' takes JSON documents (app.Even), of which no example can be made: give --json FILE with "
        in capsys.readouterr().err
    )
