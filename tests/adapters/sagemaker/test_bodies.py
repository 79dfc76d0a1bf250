"""Bodies that are not V2: which requests they stand for, and the answers in the form that the client accepts."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.calls import TensorInfo
from remora.protocols.rest.answer import HttpAnswer
from remora_adapters.sagemaker.arrays import npy_of_array
from remora_adapters.sagemaker.bodies import Part, answer_of, is_translated, translate

ROW = TensorInfo("x", "FP32", (-1, 4))
WORDS = TensorInfo("text", "BYTES", (-1, 1))
OCTETS = TensorInfo("image", "UINT8", (-1, -1))


def read(part: Part) -> dict[str, object]:
    """The inputs of a V2 request as numpy would have them."""
    header = orjson.loads(part.body[: part.json_length])
    found, at = {}, part.json_length or 0
    for each in header["inputs"]:
        size = each["parameters"]["binary_data_size"]
        data = part.body[at : at + size]
        at += size
        if each["datatype"] == "BYTES":
            found[each["name"]] = (each["shape"], data)
        else:
            dtype = {"FP32": "<f4", "INT32": "<i4", "UINT8": "u1", "BOOL": "?", "UINT64": "<u8"}[each["datatype"]]
            found[each["name"]] = np.frombuffer(data, dtype).reshape(each["shape"]).tolist()
    assert at == len(part.body)
    return found


def numpys(header: str, data: bytes) -> bytes:
    """A .npy body of any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def answer(**outputs: np.ndarray) -> HttpAnswer:
    """A V2 answer with binary outputs, as the engine's service gives it."""
    rows, data = [], b""
    for name, array in outputs.items():
        piece = array.tobytes()
        datatype = {"f": "FP32", "i": "INT64"}[array.dtype.kind]
        rows.append({"name": name, "datatype": datatype, "shape": list(array.shape)})
        rows[-1]["parameters"] = {"binary_data_size": len(piece)}
        data += piece
    header = orjson.dumps({"model_name": "m", "outputs": rows})
    length = (b"Inference-Header-Content-Length", b"%d" % len(header))
    return HttpAnswer(200, ((b"Content-Type", b"application/octet-stream"), length), [header, data])


@given(st.integers(1, 30), st.integers(1, 9))
def test_rows_of_csv_become_requests_that_the_model_takes_in_their_order(rows: int, most: int) -> None:
    body = "".join(f"{row},1,2,3\n" for row in range(rows)).encode()
    parts = translate("text/csv", body, [ROW], most).parts
    found = [row for part in parts for row in read(part)["x"]]  # type: ignore[attr-defined]
    assert found == [[row, 1, 2, 3] for row in range(rows)]
    assert all(len(read(part)["x"]) <= most for part in parts)  # type: ignore[arg-type]


def test_columns_go_to_the_inputs_one_after_the_other() -> None:
    inputs = [TensorInfo("a", "INT32", (-1, 1)), TensorInfo("b", "FP32", (-1, 2)), TensorInfo("c", "BOOL", (-1, 1))]
    (part,) = translate("text/csv", b"1,0.5,2,true\n2,1.5,3,0\n", inputs, 8).parts
    assert read(part) == {"a": [[1], [2]], "b": [[0.5, 2.0], [1.5, 3.0]], "c": [[True], [False]]}


def test_text_columns_become_elements() -> None:
    (part,) = translate("text/csv", "gut\nschön\n".encode(), [WORDS], 8).parts
    assert read(part) == {"text": ([2, 1], b"\3\0\0\0gut\6\0\0\0sch\xc3\xb6n")}


@pytest.mark.parametrize(
    ("body", "inputs", "most", "said"),
    [
        (b"1,2,3\n", [ROW], 8, "a row has 3 cells and the model takes 4"),
        (b"1,2,3,x\n", [ROW], 8, "could not convert"),
        (b"300\n", [TensorInfo("a", "UINT8", (-1, 1))], 8, "out of range"),
        (b"-1\n", [TensorInfo("a", "UINT8", (-1, 1))], 8, "out of range"),
        (b"1.5\n", [TensorInfo("a", "INT32", (-1, 1))], 8, "invalid literal"),
        (b"maybe\n", [TensorInfo("a", "BOOL", (-1, 1))], 8, "neither true nor false"),
        (b"1\n", [TensorInfo("a", "BF16", (-1, 1))], 8, "BF16"),
        (b"1,2,3,4\n5,6,7,8\n", [TensorInfo("x", "FP32", (4,))], 0, "one row at a time"),
        (b"1,2\n", [TensorInfo("a", "FP32", (-1, -1)), ROW], 8, "are ambiguous"),
    ],
)
def test_csv_that_does_not_fit_the_model_is_refused(
    body: bytes, inputs: list[TensorInfo], most: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        translate("text/csv", body, inputs, most)


def test_an_array_without_a_batch_dimension_is_one_row() -> None:
    (part,) = translate("application/x-npy", npy_of_array(np.arange(4.0)), [ROW], 8).parts
    assert read(part) == {"x": [[0, 1, 2, 3]]}


def test_an_array_of_another_type_is_cast_where_only_precision_is_lost() -> None:
    for dtype in (np.float64, np.int64, np.float32):
        (part,) = translate("application/x-npy", npy_of_array(np.ones((2, 4), dtype)), [ROW], 8).parts
        assert read(part) == {"x": [[1.0] * 4] * 2}
    with pytest.raises(ValueError, match="is INT32 and the array float64"):
        translate("application/x-npy", npy_of_array(np.ones(1)), [TensorInfo("a", "INT32", (-1,))], 0)


@pytest.mark.parametrize("media", ["image/jpeg", "application/x-image", "text/plain"])
def test_images_and_text_are_one_element_or_octets_and_no_pixels(media: str) -> None:
    (part,) = translate(media, b"\xff\xd8", [WORDS], 8).parts
    assert read(part) == {"text": ([1, 1], b"\2\0\0\0\xff\xd8")}
    (part,) = translate(media, b"\xff\xd8", [OCTETS], 8).parts
    assert read(part) == {"image": [[255, 216]]}
    with pytest.raises(ValueError, match="needs BYTES or UINT8"):
        translate(media, b"\xff\xd8", [ROW], 8)


def test_lines_that_are_v2_requests_pass_as_they_are() -> None:
    body = b'{"inputs": [1]}\n\n{"inputs": [2]}\n'
    translated = translate("application/jsonlines", body, [ROW], 8)
    assert [part.body for part in translated.parts] == [b'{"inputs": [1]}', b'{"inputs": [2]}']
    answers = [HttpAnswer(200, (), [b'{"outputs":[]}']), HttpAnswer(200, (), [b'{"id":"2"}'])]
    assert b"".join(answer_of(translated, answers, "*/*").body) == b'{"outputs":[]}\n{"id":"2"}\n'


def test_lines_of_values_and_of_named_values_become_rows() -> None:
    for body in (b"[1,2,3,4]\n[5,6,7,8]\n", b'{"x":[1,2,3,4]}\n{"x":[5,6,7,8]}\n'):
        (part,) = translate("application/jsonlines", body, [ROW], 8).parts
        assert read(part) == {"x": [[1, 2, 3, 4], [5, 6, 7, 8]]}


def test_a_line_may_be_the_one_text_of_an_input_without_dimensions() -> None:
    (part,) = translate("application/jsonlines", b'"gut"\n', [TensorInfo("text", "BYTES", ())], 0).parts
    assert read(part) == {"text": ([], b"\3\0\0\0gut")}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no lines"),
        (b"{\n", "not JSON"),
        (b'{"y": [1]}\n', "the model takes x"),
        (b"[1,2]\n[3]\n", "inhomogeneous|equally many"),
        (b"[1,2,3,4]\n" * 5000 + b"[1]\n", "dimension"),
        (b'{"inputs": [1]}\n' * 4096 + b"[1]\n", "some of its lines are V2 requests"),
        (b"[1,2,3,4]\n" * 4096 + b'{"inputs": [1]}\n', "a line has inputs and the model takes x"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_lines_that_do_not_fit_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translate("application/jsonlines", body, [ROW], 8)


@pytest.mark.parametrize(
    ("accept", "media", "body"),
    [
        ("*/*", b"text/csv", b"1.0,2.0\n3.0,4.0\n"),
        ("text/csv", b"text/csv", b"1.0,2.0\n3.0,4.0\n"),
        ("application/json", b"application/json", b'{"y":[[1.0,2.0],[3.0,4.0]]}'),
        ("application/jsonlines;q=1, text/csv", b"application/jsonlines", b"[1.0,2.0]\n[3.0,4.0]\n"),
    ],
)
def test_the_answer_has_the_form_that_is_accepted_and_its_rows_the_requests_order(
    accept: str, media: bytes, body: bytes
) -> None:
    translated = translate("text/csv", b"1,1,1,1\n2,2,2,2\n", [ROW], 1)
    parts = [answer(y=np.array([[1, 2]], "<f4")), answer(y=np.array([[3, 4]], "<f4"))]
    found = answer_of(translated, parts, accept)
    assert (dict(found.headers)[b"Content-Type"], b"".join(found.body)) == (media, body)


def test_npy_holds_one_output() -> None:
    translated = translate("application/x-npy", npy_of_array(np.ones((1, 4))), [ROW], 8)
    found = answer_of(translated, [answer(y=np.array([[1, 2]], "<f4"))], "application/x-npy")
    assert np.load(__import__("io").BytesIO(b"".join(found.body))).tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="one array and the model gives 2: y, z"):
        answer_of(translated, [answer(y=np.ones((1, 1), "<f4"), z=np.ones((1, 1), "<f4"))], "application/x-npy")


def test_several_outputs_are_named_in_json() -> None:
    translated = translate("text/csv", b"1,1,1,1\n", [ROW], 8)
    both = [answer(y=np.ones((1, 1), "<f4"), z=np.zeros((1, 1), "<i8"))]
    assert json.loads(b"".join(answer_of(translated, both, "application/json").body)) == {"y": [[1.0]], "z": [[0]]}
    assert b"".join(answer_of(translated, both, "application/jsonlines").body) == b'{"y":[1.0],"z":[0]}\n'


@pytest.mark.parametrize(
    ("media", "body"),
    [
        ("text/csv", b",".join([b"1"] * 1000 + [b"1" * 10_000])),
        ("application/jsonlines", json.dumps(["1"] * 1000 + ["1" * 10_000]).encode()),
    ],
)
def test_a_long_text_takes_its_own_room_and_not_every_neighbours(media: str, body: bytes) -> None:
    tracemalloc.start()
    try:
        (part,) = translate(media, body, [TensorInfo("x", "FP32", (-1, 1001))], 8).parts
        assert tracemalloc.get_traced_memory()[1] < 100 * len(body)
    finally:
        tracemalloc.stop()
    assert read(part) == {"x": [[1.0] * 1000 + [float("inf")]]}


@pytest.mark.parametrize(("media", "line"), [("text/csv", b"1,2,3,4\n"), ("application/jsonlines", b"[1,2,3,4]\n")])
def test_numbers_of_a_long_body_take_a_few_times_their_room_and_not_that_of_objects(media: str, line: bytes) -> None:
    tracemalloc.start()
    try:
        (part,) = translate(media, line * 250_000, [ROW], 1 << 20).parts
        assert tracemalloc.get_traced_memory()[1] < 4 * len(part.body)
    finally:
        tracemalloc.stop()
    assert len(part.body) > 250_000 * 16


def test_byte_strings_of_an_array_arrive_as_they_are() -> None:
    array = np.array([["\u00e9".encode()], [b"\xff"]])
    (part,) = translate("application/x-npy", npy_of_array(array), [WORDS], 8).parts
    assert read(part) == {"text": ([2, 1], b"\2\0\0\0\xc3\xa9\1\0\0\0\xff")}


@pytest.mark.parametrize(
    ("media", "body", "datatype"),
    [
        ("application/jsonlines", b"[99999999999999999999999]", "INT64"),
        ("application/jsonlines", b"[-1]", "UINT64"),
        ("application/x-npy", npy_of_array(np.array([[-1]])), "UINT64"),
        ("application/x-npy", npy_of_array(np.array([[2**63]], np.uint64)), "INT64"),
    ],
)
def test_a_whole_number_beyond_the_inputs_type_is_refused_and_not_wrapped(
    media: str, body: bytes, datatype: str
) -> None:
    with pytest.raises(ValueError, match="out of range"):
        translate(media, body, [TensorInfo("a", datatype, (-1, 1))], 8)


@pytest.mark.parametrize("inputs", [ROW, WORDS])
def test_rows_of_texts_that_differ_in_length_are_not_cut_anew(inputs: TensorInfo) -> None:
    with pytest.raises(ValueError, match="differ in number"):
        translate("application/jsonlines", b'["1","2","3","4","5"]\n["6","7","8"]\n', [inputs], 8)


@pytest.mark.parametrize(
    ("media", "body", "inputs"),
    [
        ("application/jsonlines", b"[" * 1024 + b"]" * 1024, [ROW]),
        ("application/jsonlines", b"{}", []),
        (
            "application/x-npy",
            numpys("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}\n", bytes(16)),
            [ROW],
        ),
        ("application/x-npy", numpys("{'descr': '<f4', 'fortran_order': False, 'shape': ()}\n", bytes(4)), [ROW]),
    ],
    ids=["deep", "no inputs", "no size", "no rows"],
)
def test_what_has_no_rows_for_the_model_is_refused(media: str, body: bytes, inputs: list[TensorInfo]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any text
        translate(media, body, inputs, 8)


@pytest.mark.parametrize(
    ("media", "body"),
    [
        ("text/csv", b"1\n" * 65_537),
        ("application/jsonlines", b"1\n" * 65_537),
        ("application/jsonlines", b'{"inputs":[]}\n' * 65_537),
        ("application/x-npy", npy_of_array(np.ones((65_537, 1), np.uint8))),
    ],
)
def test_a_body_makes_only_so_many_requests(media: str, body: bytes) -> None:
    with pytest.raises(ValueError, match="65537 requests of the model's batch size, and the limit is 65536"):
        translate(media, body, [ROW._replace(shape=(-1, 1))], 1)
    assert len(translate("text/csv", b"1\n" * 65_537, [ROW._replace(shape=(-1, 1))], 2).parts) == 32_769


def test_a_line_with_values_for_an_input_of_the_name_inputs_is_not_a_v2_request() -> None:
    translated = translate("application/jsonlines", b'{"inputs": [1, 2, 3, 4]}', [ROW._replace(name="inputs")], 8)
    assert read(translated.parts[0]) == {"inputs": [[1, 2, 3, 4]]}
    assert translate("application/jsonlines", b'{"inputs": [{"name": "inputs"}]}', [ROW], 8).own


@pytest.mark.parametrize("accept", ["text/csv", "application/jsonlines"])
def test_outputs_of_different_numbers_of_rows_have_no_form_of_lines(accept: str) -> None:
    translated = translate("text/csv", b"1,1,1,1\n", [ROW], 8)
    with pytest.raises(ValueError, match="the outputs have 3, 1 rows"):
        answer_of(translated, [answer(y=np.ones((3, 2), "<f4"), z=np.ones(1, "<f4"))], accept)


@pytest.mark.parametrize("accept", ["text/csv", "application/jsonlines"])
def test_a_single_number_is_a_line_and_an_empty_body_has_no_rows(accept: str) -> None:
    translated = translate("text/csv", b"1,1,1,1\n", [ROW], 8)
    assert b"".join(answer_of(translated, [answer(y=np.array(3, "<f4"))], accept).body) == b"3.0\n"
    assert b"".join(answer_of(translated, [answer(y=np.ones((0, 2), "<f4"))], accept).body) == b""


def test_bits_of_bf16_leave_as_the_numbers_they_are() -> None:
    translated = translate("text/csv", b"1,1,1,1\n", [ROW], 8)
    header = b'{"outputs":[{"name":"y","datatype":"BF16","shape":[1,2],"parameters":{"binary_data_size":4}}]}'
    length = (b"Inference-Header-Content-Length", b"%d" % len(header))
    found = answer_of(translated, [HttpAnswer(200, (length,), [header, b"\x80\x3f\x40\xc0"])], "text/csv")
    assert b"".join(found.body) == b"1.0,-3.0\n"


@given(st.sampled_from(["text/csv", "application/jsonlines", "application/x-npy", "image/png"]), st.binary(max_size=80))
def test_no_bytes_do_more_than_be_refused(media: str, body: bytes) -> None:
    assert is_translated(media)
    for inputs, most in (([ROW], 8), ([WORDS], 8), ([OCTETS], 0), ([ROW, WORDS], 0)):
        try:
            translate(media, body, inputs, most)
        except (ValueError, OverflowError):
            continue
