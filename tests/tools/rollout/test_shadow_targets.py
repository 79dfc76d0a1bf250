"""Shadows on other models and servers, functions that compare, and the differences that are kept."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.calls import ModelRelease
from remora.engine import Engine
from remora.errors import ConfigError, RemoraError
from remora.messages import InferForm, InputSpec, Outcome, Reply, Request, Response, Streamed, Tensor, Ticket
from remora.options import EngineOptions
from remora_tools.rollout.recordings import MAX_ANSWERS, MAX_BYTES
from remora_tools.rollout.shadow_targets import OtherModel, OtherServer, load_function, shadow_settings
from support.engine.fakes import FakeClock
from support.models.released_engine import released_engine
from support.process.eventually import eventually
from support.servers.live_server import STREAM, free_port, process, until, write_version

FORM = InferForm((InputSpec("IN", "INT32", (1, 1)),), id="r")
DATA: list[Any] = [np.array([[5]], np.int32)]


def _shadow(engine: Engine, **parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.perform(ModelRelease("m", "shadow" if parameters else "", parameters))["shadow"]
    return found


def _infer(engine: Engine, count: int = 1, id: str = "r") -> list[int]:
    return [int(engine.infer("m", {"IN": np.array([[5]], np.int32)}, id=id)["OUT"][0, 0]) for _ in range(count)]


def _compared(engine: Engine, count: int) -> dict[str, Any]:
    return eventually(lambda: row if (row := _shadow(engine))["compared"] >= count else None)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_version(root, 2)
    write_version(root, 3, name="other")
    return root


def _function(tmp_path: Path, body: str) -> str:
    (tmp_path / "compare.py").write_text(f"def same(expected, found):\n    {body}\n")
    return f"{tmp_path / 'compare.py'}:same"


# -- models of the same server ----------------------------------------------------------------------------------------


def test_another_model_gets_copies(repository: Path) -> None:
    with released_engine(repository) as engine:
        assert _shadow(engine, model="other")["title"] == "model 'other'"
        assert _infer(engine, 3) == [10] * 3
        found = _compared(engine, 3)
        assert (found["differing"], found["failed"]) == (3, 0)
        assert found["samples"][0] == "r: OUT: 1 of 1 elements differ, by at most 5"


def test_two_models_that_shadow_each_other_do_not_copy_copies(repository: Path) -> None:
    with released_engine(repository) as engine:
        _shadow(engine, model="other")
        engine.perform(ModelRelease("other", "shadow", {"model": "m"}))
        _infer(engine, 3)
        _compared(engine, 3)
        status = engine.perform(ModelRelease("other", "", {}))
        assert status["shadow"]["compared"] + status["shadow"]["dropped"] == 0
        assert sum(arm.get("answers", 0) for arm in status["arms"]) == 0


def test_a_model_that_is_unloaded_fails_the_copies_only(repository: Path) -> None:
    with released_engine(repository, model_control_mode="explicit", load_model=("m", "other")) as engine:
        _shadow(engine, model="other")
        engine.unload("other")
        assert _infer(engine, 2) == [10, 10]
        found = _compared(engine, 2)
        assert found["failed"] == 2
        assert "other" in found["samples"][0]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"model": "absent"}, "absent"),
        ({"model": "../../etc/passwd"}, "etc/passwd"),
        ({"model": "m"}, "is the model itself"),
        (
            {"url": "http://169.254.169.254/"},
            "is not a name that the server's option --shadow-url defines; there are: there",
        ),
        ({"model": "other", "compare": "/tmp/x.py:f"}, "the server's option --shadow-compare defines; there are: none"),
        ({"model": "other", "compare": "x", "top_k": 1}, "in place of tolerance and top_k"),
        ({"model": "other", "file": "x"}, "unknown member 'file'"),
        ({"model": "other", "version": 9}, "version"),
    ],
)
def test_an_unknown_shadow_is_refused(repository: Path, members: dict[str, Any], reason: str) -> None:
    with released_engine(repository, shadow_url=("there=http://localhost:1",)) as engine:
        with pytest.raises(RemoraError) as refusal:
            _shadow(engine, **members)
        assert reason in str(refusal.value)
        assert _infer(engine) == [10]


def test_a_stored_shadow_whose_name_is_gone_stops_no_server(repository: Path) -> None:
    with released_engine(repository, shadow_url=("there=http://localhost:1",)) as engine:
        _shadow(engine, url="there")
    with released_engine(repository) as engine:
        assert _infer(engine) == [10]
        assert "the server's options do not define its name" in _shadow(engine)["warning"]


def test_a_file_declares_a_shadow(repository: Path) -> None:
    (repository / "m" / "release.yaml").write_text("stable: 2\nshadow: {model: other, weight: 50%, tolerance: 9}\n")
    with released_engine(repository) as engine:
        found = _shadow(engine)
        assert (found["model"], found["weight"], found["tolerance"]) == ("other", 50.0, 9.0)


class _Scripted:
    """Model that answers a request at once with what the test wants."""

    is_routed = False

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = outcomes
        self.tickets: list[Ticket] = []

    def submit(self, form: InferForm, data: object, reply: Reply) -> Ticket:
        ticket = Ticket(Request(form, {}, (), 1, None), reply)
        self.tickets.append(ticket)
        for outcome in self.outcomes:
            reply(ticket, outcome)
        return ticket


def _output(size: int) -> Response:
    return Response([Tensor("y", "UINT8", np.zeros(size, np.uint8))])


@pytest.mark.parametrize(
    ("outcomes", "failure"),
    [
        ((), "no answer within 0.01 s"),
        ((Streamed(_output(1), False),), "no answer within 0.01 s"),
        ((Streamed(_output(MAX_BYTES), False), Streamed(_output(1), False)), f"more than {MAX_BYTES} bytes"),
        ((Streamed(_output(1), False),) * (2 * MAX_ANSWERS), ""),
    ],
)
def test_a_copy_that_does_not_end_is_cancelled(outcomes: tuple[Outcome, ...], failure: str) -> None:
    model: Any = _Scripted(*outcomes)
    answered = OtherModel(lambda: model, FakeClock(), 0.01).answer(FORM, DATA)
    assert model.tickets[0].request.cancelled
    assert failure in str(answered.failure or "")
    assert len(answered.answers) == (0 if failure else MAX_ANSWERS + 1)


def test_a_copy_that_ends_is_not_cancelled() -> None:
    model: Any = _Scripted(Streamed(_output(1), False), Streamed(None, True))
    answered = OtherModel(lambda: model, FakeClock(), 0.0).answer(FORM, DATA)
    assert (len(answered.answers), answered.failure, model.tickets[0].request.cancelled) == (1, None, False)


def test_a_shadow_that_has_ended_cancels_its_copies() -> None:
    model: Any = _Scripted()
    target = OtherModel(lambda: model, FakeClock())
    thread = threading.Thread(target=target.answer, args=(FORM, DATA))
    thread.start()
    eventually(lambda: model.tickets)
    target.close()
    thread.join()
    assert model.tickets[0].request.cancelled
    assert "has ended" in str(target.answer(FORM, DATA).failure)


ENDLESS = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            open({begun!r}, "w").close()
            while not request.is_cancelled():
                time.sleep(0.01)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_a_stop_of_the_server_waits_for_no_copy_and_counts_none(repository: Path, tmp_path: Path) -> None:
    begun, rows = tmp_path / "begun", tmp_path / "differences.jsonl"
    (repository / "other" / "config.pbtxt").write_text(STREAM)
    (repository / "other" / "3" / "model.py").write_text(ENDLESS.format(begun=str(begun)))
    with released_engine(repository, shadow_differences=str(rows)) as engine:
        _shadow(engine, model="other")
        assert _infer(engine, 3) == [10] * 3
        eventually(begun.exists)
        assert engine.stop(3600)
    assert rows.read_text() == ""


# -- functions --------------------------------------------------------------------------------------------------------


def test_a_function_of_the_operator_compares(repository: Path, tmp_path: Path) -> None:
    place = _function(tmp_path, "return '' if expected['OUT'][0] == 10 else f'odd {found}'")
    with released_engine(repository, shadow_compare=(f"close={place}",)) as engine:
        _shadow(engine, model="other", compare="close")
        _infer(engine, 3)
        found = _compared(engine, 3)
        assert (found["differing"], found["failed"]) == (0, 0)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("return None", ""),
        ("return True", ""),
        ("return False", "the function says they differ"),
        ("return ''", ""),
        ("return 'x'", "x"),
        ("import numpy; return numpy.bool_(True)", ""),
        ("import numpy; return numpy.bool_(False)", "the function says they differ"),
    ],
)
def test_a_function_returns_a_truth_or_a_text(tmp_path: Path, body: str, result: str) -> None:
    assert load_function(_function(tmp_path, body))({}, {}) == result


@pytest.mark.parametrize(
    ("body", "kind"),
    [("return 7", "int"), ("return 0.0", "float"), ("return []", "list"), ("return expected['OUT']", "ndarray")],
)
def test_another_result_of_a_function_is_a_failed_comparison(
    repository: Path, tmp_path: Path, body: str, kind: str
) -> None:
    place = _function(tmp_path, body)
    with released_engine(repository, shadow_compare=(f"same={place}",)) as engine:
        _shadow(engine, model="other", compare="same")
        _infer(engine, 1)
        found = _compared(engine, 1)
        assert (found["differing"], found["failed"]) == (1, 1)
        text = f"cannot be compared: TypeError: the function 'same' returned {kind}: expected str, bool or None"
        assert text in found["samples"][0]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("shadow_compare", "close", "expected NAME=FILE:FUNCTION"),
        ("shadow_compare", "close=absent.py:same", "expected a Python file"),
        ("shadow_compare", "close=compare.py:absent", "AttributeError"),
        ("shadow_compare", "close=compare.py:__name__", "is not a function"),
        ("shadow_url", "a b=http://host", "expected NAME=URL"),
        ("shadow_url", "a-b=http://user:secret@host", "expected NAME=URL"),
        ("shadow_url", "a=ftp://host", "address of 'a': expected http://HOST:PORT"),
        ("shadow_url", "a=http://user:secret@host", "address of 'a'"),
        ("shadow_url", "a=http://host:port", "address of 'a'"),
    ],
)
def test_wrong_options_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    _function(tmp_path, "pass")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason) as refusal:
        shadow_settings(EngineOptions(**{name: (value,)}), FakeClock())  # type: ignore[arg-type]
    assert "secret" not in str(refusal.value)


# -- other servers ----------------------------------------------------------------------------------------------------


def _sent(server: OtherServer, form: InferForm = FORM) -> Tensor:
    """Return the output of the one answer to a copy. Raises RemoraError."""
    try:
        ((output,),) = server.answer(form, DATA).answers
    finally:
        server.end_thread()
    return output


def _failure(server: OtherServer) -> str:
    with pytest.raises(RemoraError) as failure:
        _sent(server)
    return str(failure.value)


def test_another_server_gets_copies(repository: Path, tmp_path: Path, child_environment: dict[str, str]) -> None:
    port = free_port()
    write_version(tmp_path / "theirs", 7)
    with process(tmp_path / "theirs", port, child_environment) as server:
        until(port, "/readyz", server)
        with released_engine(repository, shadow_url=(f"there=http://127.0.0.1:{port}",)) as engine:
            assert _shadow(engine, url="there")["title"] == "the model at 'there'"
            assert _infer(engine, 4) == [10] * 4
            found = _compared(engine, 4)
            assert (found["differing"], found["failed"]) == (4, 0)
            assert found["samples"][0] == "r: OUT: 1 of 1 elements differ, by at most 25"
        url = f"http://127.0.0.1:{port}"
        assert _sent(OtherServer(url, "m", 7)).data.tolist() == [[35]]
        assert "HTTP status 404" in _failure(OtherServer(url, "m", 8))
        assert "HTTP status 404" in _failure(OtherServer(url, "../m", 7))


def test_a_server_that_cannot_be_reached_fails_the_copies_only(repository: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with released_engine(repository, shadow_url=(f"there=http://127.0.0.1:{held.getsockname()[1]}",)) as engine:
            _shadow(engine, url="there")
            assert _infer(engine, 3) == [10] * 3
            found = _compared(engine, 3)
            assert found["failed"] == 3
            assert "ConnectionRefusedError" in found["samples"][0]


def test_a_server_that_never_answers_is_given_up_and_copies_are_dropped(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "timed out" in _failure(OtherServer(url, "m", timeout_s=0.01))
        with released_engine(repository, shadow_url=(f"there={url}",)) as engine:
            _shadow(engine, url="there")
            assert _infer(engine, 200) == [10] * 200  # each answer comes although no copy is answered
            found = _shadow(engine)
            assert found["dropped"] > 0
            assert found["compared"] == 0
            assert not engine.resolve("m").is_routed  # as without a shadow, until copies have room again


@contextmanager
def _double(answer: Callable[[str | None, Any], tuple[int, bytes]]) -> Iterator[str]:
    """Serve answers to the length header and JSON of each request, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            length = self.headers.get("inference-header-content-length")
            status, content = answer(length, json.loads(body[: int(length)] if length else body))
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_server_without_binary_tensors_gets_json() -> None:
    lengths: list[str | None] = []
    parameters: list[Any] = []

    def answer(length: str | None, document: Any) -> tuple[int, bytes]:
        lengths.append(length)
        parameters.append(document.get("parameters", {}))
        if length:
            return 422, b"{}"
        output = {**document["inputs"][0], "name": "OUT"}
        return 200, json.dumps({"outputs": [output]}).encode()

    with _double(answer) as url:
        server = OtherServer(url, "m")
        for _ in range(2):
            found = _sent(server, replace(FORM, parameters={"a": 1, "X-Api-Key": "secret", "authorization": "secret"}))
            assert (found.name, found.data.tolist()) == ("OUT", [[5]])
    assert [length is None for length in lengths] == [False, True, True]
    assert all(each["a"] == 1 for each in parameters)
    assert "secret" not in json.dumps(parameters)


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"outputs": [{"name": "y"}]}'])
def test_an_answer_that_is_not_of_v2_is_a_failure(content: bytes) -> None:
    with _double(lambda _length, _document: (200, content)) as url:
        assert "not of V2" in _failure(OtherServer(url, "m"))


# -- differences ------------------------------------------------------------------------------------------------------


def test_differences_are_kept_without_redacted_values(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "differences.jsonl"
    with released_engine(repository, shadow_differences=str(path), capture_redact=("m:IN",)) as engine:
        _shadow(engine, model="other")
        _infer(engine, 2)
        _compared(engine, 2)
        eventually(lambda: len(path.read_text().splitlines()) == 2)  # a difference is kept after it is counted
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["reason"] for row in rows] == ["OUT: 1 of 1 elements differ, by at most 5"] * 2
    assert (rows[0]["model"], rows[0]["version"], rows[0]["shadow"], rows[0]["id"]) == ("m", "2", "model 'other'", "r")
    assert rows[0]["inputs"] == [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "redacted": True}]
    assert (rows[0]["expected"][0]["data"], rows[0]["found"][0]["data"]) == ([10], [15])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a disk that is full, exists on Linux only")
def test_a_full_disk_costs_the_differences_alone(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    with released_engine(repository, shadow_differences="/dev/full") as engine:
        _shadow(engine, model="other")
        assert _infer(engine, 5) == [10] * 5
        assert _compared(engine, 5)["differing"] == 5
        eventually(lambda: "differences of shadows cannot be written" in caplog.text)


def test_a_file_that_cannot_be_opened_prevents_the_start(repository: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="--shadow-differences="),
        released_engine(repository, shadow_differences=str(tmp_path / "absent" / "file")),
    ):
        pass
