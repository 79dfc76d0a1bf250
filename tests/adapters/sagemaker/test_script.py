"""An ``inference.py`` through the platform's port: each function of the toolkits, in a separate worker."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from remora_adapters import sagemaker
from support.servers.sagemaker_door import Door, opened

ALL = """
import json
import os
from neighbour import FACTOR

def model_fn(model_dir):
    with open(os.path.join(model_dir, "weight")) as file:
        return float(file.read())

def input_fn(request_body, content_type):
    if content_type == "text/fails":
        raise ValueError("cannot read this")
    assert isinstance(request_body, str if content_type == "application/json" else bytes)
    return json.loads(request_body)["value"]

def predict_fn(value, model, context):
    return value * model * FACTOR

def output_fn(prediction, accept):
    if accept == "text/special":
        return f"special {prediction}", "text/other"
    return json.dumps({"answer": prediction})
"""


@contextmanager
def serving(base: Path, script: str, **environ: str) -> Iterator[Door]:
    code = base / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(script)
    (code / "neighbour.py").write_text("FACTOR = 10\n")
    (base / "model" / "weight").write_text("3")
    with opened(sagemaker.host({"SAGEMAKER_BASE_DIR": str(base), **environ})) as door:
        yield door


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with serving(tmp_path_factory.mktemp("ml"), ALL) as found:
        yield found


@pytest.mark.parametrize("media", ["application/json", "application/octet-stream", None])
def test_the_four_functions_are_called_in_turn(door: Door, media: str | None) -> None:
    headers = {"Content-Type": media} if media else {}
    reply = door.ask("POST", "/invocations", b'{"value": 2}', headers)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert json.loads(reply.body) == {"answer": 60.0}


def test_a_pair_from_output_fn_names_the_content_type(door: Door) -> None:
    reply = door.ask("POST", "/invocations", b'{"value": 2}', {"Accept": "text/special"})
    assert (reply.body, reply.headers["content-type"]) == (b"special 60.0", "text/other")


def test_what_the_script_raises_is_the_answer_and_the_next_request_is_served(door: Door) -> None:
    reply = door.ask("POST", "/invocations", b"x", {"Content-Type": "text/fails"})
    assert (reply.status, json.loads(reply.body)) == (500, {"error": "ValueError: cannot read this"})
    assert door.ask("POST", "/invocations", b'{"value": 1}').status == 200


def test_a_script_that_ends_itself_says_so_in_its_own_form_and_serves_on(tmp_path: Path) -> None:
    with serving(tmp_path, "import sys\ndef predict_fn(data, model):\n    sys.exit(3)\n") as door:
        for _ in range(2):
            reply = door.ask("POST", "/invocations", b"[1]")
            assert (reply.status, json.loads(reply.body)) == (500, {"error": "SystemExit: 3"})


@pytest.mark.parametrize("media", ["application/json", "text/csv", "text/plain"])
def test_text_that_is_not_utf8_is_the_clients_fault(door: Door, media: str) -> None:
    reply = door.ask("POST", "/invocations", b"\xff", {"Content-Type": media})
    assert reply.status == 400
    assert media in json.loads(reply.body)["error"]


def test_an_unreadable_type_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, "def predict_fn(data, model):\n    return data\n") as door:
        assert door.ask("POST", "/invocations", b"1", {"Content-Type": "text/\u00ff"}).status == 415


def test_without_its_own_functions_arrays_go_in_and_out(tmp_path: Path) -> None:
    with serving(tmp_path, "def predict_fn(data, model):\n    return data + 1\n") as door:
        assert door.ask("POST", "/invocations", b"[[1, 2]]").body == b"[[2,3]]"
        csv = {"Content-Type": "text/csv", "Accept": "text/csv"}
        assert door.ask("POST", "/invocations", b"1,2\n3,4\n", csv).body == b"2.0,3.0\n4.0,5.0\n"
        file = io.BytesIO()
        np.save(file, np.arange(3))
        npy = {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}
        reply = door.ask("POST", "/invocations", file.getvalue(), npy)
        assert np.load(io.BytesIO(reply.body)).tolist() == [1, 2, 3]
        assert door.ask("POST", "/invocations", b"x", {"Content-Type": "image/png"}).status == 415
        assert door.ask("POST", "/invocations", b"[1]", {"Accept": "image/png"}).status == 406
        assert door.ask("POST", "/invocations", b"[1").status == 400


def test_transform_fn_does_it_all(tmp_path: Path) -> None:
    script = "def transform_fn(model, data, content_type, accept):\n    return data.upper() + content_type + accept\n"
    with serving(tmp_path, script) as door:
        headers = {"Content-Type": "text/plain", "Accept": "text/csv"}
        assert door.ask("POST", "/invocations", b"abc", headers).body == b"ABCtext/plaintext/csv"


def test_a_script_that_can_predict_nothing_does_not_become_ready(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="neither predict_fn nor transform_fn"), serving(tmp_path, "x = 1\n"):
        pass


def test_the_default_accept_is_the_toolkits_variable(tmp_path: Path) -> None:
    script = "def predict_fn(data, model):\n    return data\n"
    with serving(tmp_path, script, SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT="text/csv") as door:
        assert door.ask("POST", "/invocations", b"[[1, 2]]").body == b"1,2\n"
