"""Form of the page at /: values that the form refuses before it sends them, and the words of its fields.

Node runs the script of the page without a document, because the functions under test use none.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from remora.server.http import pages

NODE = shutil.which("node") or ""
HOME = Path(pages.__file__).with_name("home")
pytestmark = pytest.mark.skipif(not NODE, reason="node is not installed: apt-get install nodejs")


def run(expression: str, **names: Any) -> Any:
    """Return the value of an expression of the form's script, or the text of its error."""
    given = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in names.items())
    ask = f"let result; try {{ result = {expression}; }} catch (error) {{ result = error.message; }}"
    script = f"{given}{(HOME / 'form.js').read_text()}\n{ask}\nprocess.stdout.write(JSON.stringify(result ?? null));"
    done = subprocess.run([NODE], input=script, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def value(datatype: str, shape: list[int], text: str, *, batched: bool = False) -> Any:
    tensor = {"name": "image", "datatype": datatype, "shape": shape}
    return run("valueOf(tensor, false, text)", chosen={"batched": batched}, tensor=tensor, text=text)


@pytest.mark.parametrize(
    ("datatype", "shape", "text", "error"),
    [
        ("FP32", [64], "1, 2, 3", "image takes 64 numbers, here are 3"),
        ("FP32", [-1, 64], "[[1, 2, 3]]", "image takes 64 numbers, here are 3"),
        ("FP32", [-1, 64], "1", "image takes 64 numbers, here is 1"),
        ("FP32", [-1, 2], "[1, 2, 3]", "image takes 2 numbers for each row, here are 3"),
        ("FP32", [-1, 2], "[]", "image takes 2 numbers, here are 0"),
        (
            "FP32",
            [-1, 3],
            "[[1, 2], [3, 4], [5, 6]]",
            "image takes values of the shape [-1,3], here is [3,2]; -1 is any size",
        ),
        ("FP32", [-1, 2], "[[1], [2, 3, 4]]", "image: the lists have different lengths"),
        ("FP32", [1], "[1, 2]", "image takes 1 number, here are 2"),
        ("BOOL", [2], "true", "image takes 2 truth values, here is 1"),
        ("BYTES", [3], "one\ntwo", "image takes 3 texts, here are 2"),
        ("INT64", [1], "1.5", "image: expected integers, here is 1.5"),
        ("FP32", [1], '["x"]', 'image: expected numbers, here is "x"'),
        ("FP32", [1], "null", "image: expected numbers, here is null"),
        ("BOOL", [1], "0", "image: expected true or false, here is 0"),
    ],
)
def test_values_that_do_not_fit_are_counted_before_they_are_sent(
    datatype: str, shape: list[int], text: str, error: str
) -> None:
    assert value(datatype, shape, text, batched=shape[0] < 0) == error


@pytest.mark.parametrize(
    ("datatype", "shape", "text", "sent"),
    [
        ("FP32", [-1, 2], "1, 2", {"shape": [1, 2], "data": [1, 2]}),
        ("FP32", [-1, 2], "[1, 2, 3, 4]", {"shape": [2, 2], "data": [1, 2, 3, 4]}),
        ("FP32", [2, 2], "[[1, 2], [3, 4]]", {"shape": [2, 2], "data": [1, 2, 3, 4]}),
        ("BOOL", [1], "true", {"shape": [1], "data": [True]}),
        ("BYTES", [1], "two\nlines", {"shape": [1], "data": ["two\nlines"]}),
    ],
)
def test_values_that_fit_are_sent_with_their_shape(
    datatype: str, shape: list[int], text: str, sent: dict[str, Any]
) -> None:
    assert value(datatype, shape, text, batched=shape[0] < 0) == sent


def test_a_model_without_batches_may_take_an_empty_list() -> None:
    assert value("FP32", [-1], "[]") == {"shape": [0], "data": []}


def test_a_field_is_described_by_the_hint_and_the_default_of_its_function() -> None:
    words = {"doc": "Return it.", "inputs": {"n": {"hint": "int", "default": "1"}}}
    config = {"parameters": {"FUNCTION": {"string_value": json.dumps(words)}}}
    assert run("wordsOf(config)", config=config) == words
    tensor = {"name": "n", "datatype": "INT64", "shape": [1]}
    row = {**words["inputs"]["n"], "isJson": False, "isOptional": True}  # type: ignore[index]
    assert run("typeOf(tensor, row)", tensor=tensor, row=row) == "int = 1"
    assert run("typeOf(tensor, row)", tensor=tensor, row={"isJson": False, "isOptional": True}) == "INT64 [1], optional"


@pytest.mark.parametrize("text", ["", "no JSON", "null", "[]", "3", '{"inputs": null}'])
def test_a_parameter_of_another_program_describes_nothing(text: str) -> None:
    config = {"parameters": {"FUNCTION": {"string_value": text}}}
    assert run("wordsOf(config)", config=config) == {"doc": "", "inputs": {}}


@pytest.mark.parametrize(
    ("hint", "is_json", "takes_file"),
    [
        ("", False, True),
        ("bytes", False, True),
        ("Image", False, True),
        ("str", False, False),
        ("str | None", False, False),
        ("", True, True),
        ("dict", True, False),
    ],
)
def test_a_text_of_a_function_is_typed_and_bytes_come_from_files(hint: str, is_json: bool, takes_file: bool) -> None:
    assert run("takesFile(is_json, hint)", hint=hint, is_json=is_json) is takes_file


def test_items_of_a_stream_are_lines_and_pieces_of_a_language_model_are_not() -> None:
    assert run("['one', 'two'].map((each) => itemText([each], false)).join('')") == "one\ntwo\n"
    assert run("['one', ' two'].map((each) => itemText([each], true)).join('')") == "one two"
    assert run("itemText([{ n: 1 }], false)") == '{"n":1}\n'
    assert run("itemText([text], false)", text='{"n": 1}') == '{"n": 1}\n'
    assert run("['[', '1]'].map((each) => itemText([each], true)).join('')") == "[1]"
