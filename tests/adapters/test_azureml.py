"""Azure ML: scoring scripts run unchanged, routes and headers are Azure's, probes say the truth while all loads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT, START_TIMEOUT_S, end, free_ports
from hosting import Got, ask, hosted, running, v2_request, write_scale
from remora import __version__
from remora_adapters import azureml
from remora_adapters.azureml.entry_script import EntryScript
from remora_adapters.azureml.raw_http import AMLRequest, AMLResponse, UploadedFile, register_modules
from remora_adapters.azureml.swagger import ANYTHING, Named, NoDocumentError, find_document, schemas_of

REFERENCE = Path(os.environ.get("REMORA_AZUREML_VENV", ROOT / ".venv-azureml"))
"""An environment with azureml-inference-server-http: `make test-azureml`."""

PLAIN = """
import json, os, time
import numpy

def init():
    global factor
    factor = 2

def run(data):
    value = json.loads(data)
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "raise":
        raise ValueError("a reason that only the log has")
    if kind == "none":
        return None
    if kind == "text":
        return "text"
    if kind == "unprintable":
        return numpy.zeros(2)
    if kind == "query":
        return value
    if kind == "wait":
        while not os.path.exists(value["until"]):
            time.sleep(0.005)
    return [factor * number for number in value["data"]]
"""

RAW = """
from azureml.contrib.services.aml_request import AMLRequest, rawhttp
from azureml.contrib.services.aml_response import AMLResponse

def init():
    pass

@rawhttp
def run(request):
    kind = request.args.get("kind")
    if kind == "bytes":
        return AMLResponse(request.get_data()[::-1], 200, {"Content-Type": "application/octet-stream"})
    if kind == "status":
        return AMLResponse("no", int(request.args["status"]))
    if kind == "headers":
        return AMLResponse({"a": 1}, 201, {"X-List": "a, b,c"}, json_str=True)
    if kind == "files":
        file = request.files["image"]
        size = len(file.read())
        return {"name": file.filename, "size": size, "note": request.form["note"], "method": request.method}
    if kind == "header":
        return request.headers["x-given"]
    if kind == "empty":
        return AMLResponse(None, 200)
    if kind == "rows":
        return [line.decode("latin-1") for line in request.files["image"]]
    if kind == "flask":
        args, headers = request.args, request.headers
        return {
            "numbers": [args.get(key, 7, type=int) for key in ("n", "kind", "none")] + [headers.get("x-n", type=int)],
            "lists": args.to_dict(flat=False),
            "flat": args.to_dict(),
            "values": request.values.getlist("n"),
            "headers": sorted(pair for pair in headers if pair[0].startswith("X-")),
            "host": request.base_url == "http://" + request.host + "/score",
        }
    return {"method": request.method, "path": request.path, "all": request.args.getlist("a"), "json": request.is_json}
"""

SCHEMA = """
from inference_schema.schema_decorators import input_schema, output_schema
from inference_schema.parameter_types.numpy_parameter_type import NumpyParameterType
import numpy

def init():
    pass

@input_schema("data", NumpyParameterType(numpy.array([[1.0, 2.0]])))
def run(data, factor=3, request_headers={}):
    return {"sum": float(data.sum()) * factor, "agent": request_headers.get("X-Given", "")}
"""

DOCUMENTS = [
    ("GET", f"/swagger.json{query}", b"", {}) for query in ("", "?version=3", "?a=1&version=3.1", "?version=2.0")
]
JSON = {"Content-Type": "application/json"}
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    + bytes(range(256))
    + b"\r\n\n\r--\r\n--b--\r\n"
)
Case = tuple[str, str, bytes, dict[str, str]]


class Deployed(NamedTuple):
    """A script and what is asked of it, and what else its deployment has: variables, and files beside it."""

    script: str
    cases: list[Case]
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


PAGE = {"Origin": "https://a.example"}
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-b, content-type"}
FROM_PAGES: list[Case] = [
    ("GET", "/", b"", PAGE),
    ("POST", "/score", b'{"data": [1]}', PAGE),
    ("POST", "/score", b'{"data": [1]}', {"Origin": "HTTPS://A.example"}),
    ("POST", "/score", b'{"data": [1]}', {"Origin": "https://c.example"}),
    ("POST", "/score", b'{"data": [1]}', {}),
    ("POST", "/score", b'{"kind": "raise"}', PAGE),
    ("POST", "/score", b'{"data": [1]}', {**PAGE, "x-request-id": "r" * 101}),
    ("PUT", "/score", b"", PAGE),
    ("GET", "/nowhere", b"", PAGE),
    ("OPTIONS", "/score", b"", PAGE),
    ("OPTIONS", "/score", b"", {**PAGE, **ASKED}),
    ("OPTIONS", "/score", b"", {**PAGE, "Access-Control-Request-Method": "get"}),
    ("OPTIONS", "/score", b"", {**PAGE, "Access-Control-Request-Method": "PUT"}),
    ("OPTIONS", "/score", b"", {**ASKED, "Origin": "https://c.example"}),
    ("OPTIONS", "/", b"", {**PAGE, **ASKED}),
    ("OPTIONS", "/swagger.json", b"", {**PAGE, **ASKED}),
]
CASES: dict[str, Deployed] = {
    "plain": Deployed(
        PLAIN,
        [
            ("GET", "/", b"", {}),
            ("POST", "/score", b'{"data": [1, 2.5]}', JSON),
            ("POST", "/score", b'{"data": [1, 2.5]}', {"Content-Type": "text/plain"}),
            ("POST", "/score", b'{"kind": "raise"}', JSON),
            ("POST", "/score", b'{"kind": "none"}', JSON),
            ("POST", "/score", b'{"kind": "text"}', JSON),
            ("POST", "/score", b'{"kind": "unprintable"}', JSON),
            ("POST", "/score", b"\xff\xfe", JSON),
            ("POST", "/score", b"", JSON),
            ("GET", "/score?kind=%22query%22&a=1&b=%5B1,2%5D&c=x&d=null&e=1&e=2", b"", {}),
            ("PUT", "/score", b"{}", JSON),
            ("DELETE", "/", b"", {}),
            ("POST", "/", b"", {}),
            ("OPTIONS", "/score", b"", {}),
            ("OPTIONS", "/", b"", {}),
            ("HEAD", "/", b"", {}),
            ("HEAD", "/score", b"", {}),
            ("GET", "/nowhere", b"", {}),
            *DOCUMENTS,
            ("GET", "/swagger.json?version=9", b"", {}),
            ("POST", "/score", b'{"data": []}', {**JSON, "x-request-id": "r" * 100}),
            ("POST", "/score", b'{"data": []}', {**JSON, "x-request-id": "r" * 101}),
            ("POST", "/score", b'{"data": []}', {**JSON, "x-ms-request-id": "old"}),
            ("POST", "/score", b'{"data": []}', {**JSON, "x-ms-client-request-id": "new", "x-request-id": "r"}),
            ("POST", "/score", b'{"data": []}', {**JSON, "x-ms-client-request-id": "n" * 101}),
            ("POST", "/score", b'{"data": []}', {**JSON, "TraceId": "t", "x-request-id": "r"}),
            ("GET", "/", b"", {"x-request-id": "probe"}),
        ],
    ),
    "raw": Deployed(
        RAW,
        [
            ("POST", "/score?kind=bytes", bytes(range(256)), {"Content-Type": "application/octet-stream"}),
            ("POST", "/score?kind=status&status=404", b"", {}),
            ("POST", "/score?kind=status&status=503", b"", {}),
            ("POST", "/score?kind=headers", b"", {}),
            ("POST", "/score?kind=files", FORM, {"Content-Type": "multipart/form-data; boundary=b"}),
            ("POST", "/score?kind=header", b"", {"X-Given": "here"}),
            ("POST", "/score?kind=header", b"", {}),
            ("POST", "/score?kind=empty", b"", {}),
            ("POST", "/score?kind=rows", FORM, {"Content-Type": "multipart/form-data; boundary=b"}),
            ("POST", "/score?kind=flask&n=3&n=4", b"", {"x-n": "5", "X-other-NAME": "a,b"}),
            ("GET", "/score?a=1&a=2", b"", {}),
            ("POST", "/score", b"{}", {"Content-Type": "application/json; charset=utf-8"}),
            ("OPTIONS", "/score", b"", {}),
        ],
    ),
    "schema": Deployed(
        SCHEMA,
        [
            ("POST", "/score", b'{"data": [[1, 2]]}', {**JSON, "X-Given": "here"}),
            ("POST", "/score", b'{"data": [[1, 2]], "factor": 2}', {**JSON, "x-given": "in lower case"}),
            ("POST", "/score", b"{}", JSON),
            ("POST", "/score", b"", JSON),
            ("POST", "/score", b"[]", JSON),
            ("POST", "/score", b"{", JSON),
            ("POST", "/score", b"{}", {"Content-Type": "text/plain"}),
            ("GET", "/score?data=%5B%5B1,2%5D%5D", b"", {}),
            *DOCUMENTS,
        ],
        {
            "SERVICE_NAME": "digits",
            "SERVICE_VERSION": "7",
            "SERVICE_PATH_PREFIX": "/api/v1/",
            "SERVER_VERSION_LOG_RESPONSE_ENABLED": "false",
        },
    ),
    "pages of one origin": Deployed(PLAIN, FROM_PAGES, {"AML_CORS_ORIGINS": "https://a.example"}),
    "pages of two": Deployed(PLAIN, FROM_PAGES, {"AML_CORS_ORIGINS": "https://b.example, https://a.example"}),
    "pages of all": Deployed(PLAIN, FROM_PAGES, {"AML_CORS_ORIGINS": "*"}),
    "config file": Deployed(
        PLAIN,
        [("POST", "/score", b'{"kind": "wait", "data": []}', JSON), *DOCUMENTS],
        files={
            "swagger3.json": '{"openapi": "mine"}',
            "config.json": '{"SCORING_TIMEOUT_MS": 50, "SERVICE_NAME": "digits", "of others": [1]}',
        },
    ),
}


def environment(folder: Path, script: str) -> dict[str, str]:
    return deployed(folder, Deployed(script, []))


def deployed(folder: Path, what: Deployed) -> dict[str, str]:
    for name, text in {"score.py": what.script, **what.files}.items():
        (folder / name).write_text(text)
    (folder / "models").mkdir()
    return {
        **what.variables,
        "AML_APP_ROOT": str(folder),
        "AZUREML_ENTRY_SCRIPT": "score.py",
        "AZUREML_MODEL_DIR": str(folder / "models"),
    }


def wait_until_healthy(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Return once ``/`` says so. Fails with the process's output when that ends before."""
    pause = threading.Event()
    for _ in range(int(START_TIMEOUT_S / 0.02)):
        with suppress(OSError):
            if ask(port, "GET", "/").status == 200:
                return
        assert process is None or process.poll() is None, "the server ended"
        pause.wait(0.02)
    pytest.fail("the server did not become healthy")


@pytest.fixture(params=[name for name, what in CASES.items() if "inference_schema" not in what.script])
def scored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A script's name, and our port that runs it."""
    with hosted("azureml", deployed(tmp_path, CASES[request.param])) as port:
        wait_until_healthy(port)
        yield request.param, port


# -- against Azure's own server ---------------------------------------------------------------------------------------

TELLING = (
    "content-type",
    "x-ms-run-function-failed",
    "x-ms-request-id",
    "x-ms-client-request-id",
    "traceid",
    "x-list",
    "access-control-allow-origin",
    "access-control-allow-methods",
    "access-control-allow-headers",
    "vary",
)


def comparable(got: Got, sent: dict[str, str]) -> tuple[object, ...]:
    """What must be the same: not the time that something took, nor ids that were made up."""
    headers = {name: got.headers.get(name, "") for name in TELLING}
    if not {"x-request-id", "x-ms-request-id", "x-ms-client-request-id"} & {name.lower() for name in sent}:
        headers["x-ms-request-id"] = str(bool(headers["x-ms-request-id"]))
    present = [name in got.headers for name in ("x-request-id", "x-ms-run-fn-exec-ms", "x-ms-server-version")]
    body = json.loads(got.body) if got.body and headers["content-type"] == "application/json" else got.body
    return got.status, headers, present, without_prose(body)


def without_prose(value: Any) -> Any:
    """A document without what it says for people."""
    if isinstance(value, dict):
        return {key: without_prose(inner) for key, inner in value.items() if key != "description"}
    return [without_prose(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.skipif(
    not (REFERENCE / "bin" / "azmlinfsrv").exists(), reason="azmlinfsrv is not there: make test-azureml"
)
@pytest.mark.parametrize("name", CASES)
def test_azures_server_gives_the_same_answers(name: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    theirs, ours = free_ports(2)
    variables = child_environment | deployed(tmp_path, CASES[name])
    python = REFERENCE / "bin" / "python"
    commands = [
        [REFERENCE / "bin" / "azmlinfsrv", "--entry_script", "score.py", "--port", str(theirs)],
        [python, "-m", "remora_adapters.azureml", f"--http-port={ours}"],
    ]
    with (tmp_path / "log.txt").open("wb") as log:
        processes = [
            subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=log, stderr=log) for command in commands
        ]
        try:
            for port in (theirs, ours):
                wait_until_healthy(port)
            different = []
            for method, path, body, headers in CASES[name].cases:
                wanted, got = (comparable(ask(port, method, path, body, headers), headers) for port in (theirs, ours))
                if wanted != got:
                    different.append(f"{method} {path} {body[:40]!r}\n  theirs {wanted}\n  ours   {got}")
            assert not different, "\n".join(different)
        finally:
            for process in processes:
                end(process)


@pytest.mark.skipif(
    not (REFERENCE / "bin" / "azmlinfsrv").exists(), reason="azmlinfsrv is not there: make test-azureml"
)
def test_azures_server_runs_our_script(tmp_path: Path, child_environment: dict[str, str]) -> None:
    mounted = tmp_path / "scale" / "1"
    write_scale(mounted / "repository" / "scale")
    (port,) = free_ports(1)
    script = Path(azureml.__file__).parent / "score.py"
    command = [REFERENCE / "bin" / "azmlinfsrv", "--entry_script", script, "--port", str(port)]
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=child_environment | {"AZUREML_MODEL_DIR": str(mounted)}, stdout=log, stderr=log
        )
        try:
            wait_until_healthy(port)
            answer = ask(port, "POST", "/score", v2_request([[1, 2, 3, 4]]))
            assert answer.json["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
            data = np.array([1, 2, 3, 4], np.float32).tobytes()
            spec = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
            header = json.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}}).encode()
            told = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"}
            answer = ask(port, "POST", "/score", header + data, told)
            length = int(answer.headers["inference-header-content-length"])
            assert np.frombuffer(answer.body[length:], np.float32).tolist() == [2.0, 4.0, 6.0, 8.0]
            assert ask(port, "POST", "/score?model_name=none", v2_request([[1, 2, 3, 4]])).status == 404
        finally:
            end(process)


# -- without it -------------------------------------------------------------------------------------------------------


def test_every_case_is_answered_without_a_server_error_of_ours(scored: tuple[str, int]) -> None:
    name, port = scored
    for method, path, body, headers in CASES[name].cases:
        got = ask(port, method, path, body, headers)
        assert got.status in (200, 201, 400, 404, 405, 431, 500, 503), (method, path, got)
        if got.status != 404 and path != "/nowhere" and got.status not in (405, 431):
            assert got.headers["x-request-id"]


def test_a_script_scores_and_says_how_long_it_took(tmp_path: Path) -> None:
    with hosted("azureml", environment(tmp_path, PLAIN)) as port:
        wait_until_healthy(port)
        got = ask(port, "POST", "/score", {"data": [1, 2]})
        assert (got.status, got.json) == (200, [2, 4])
        assert float(got.headers["x-ms-run-fn-exec-ms"]) >= 0
        failed = ask(port, "POST", "/score", {"kind": "raise"})
        assert failed.status == 500
        assert failed.headers["x-ms-run-function-failed"] == "True"
        assert b"only the log has" not in failed.body


def test_a_restriction_of_inference_holds_for_scripts_too(tmp_path: Path) -> None:
    host = azureml.host(environment(tmp_path, PLAIN))
    locked = replace(host.server, http_restricted_api=("inference:api-key=secret",))
    with running(replace(host, server=locked)) as ports:
        wait_until_healthy(ports.http)
        assert ask(ports.http, "POST", "/score", {"data": [1]}).status == 403
        assert ask(ports.http, "POST", "/score", {"data": [1]}, {"api-key": "secret"}).json == [2]


def test_a_script_that_ends_itself_is_answered_for_and_the_server_lives(tmp_path: Path) -> None:
    with hosted("azureml", environment(tmp_path, "import sys\ndef init(): pass\ndef run(data): sys.exit(1)")) as port:
        wait_until_healthy(port)
        for _ in range(2):
            got = ask(port, "POST", "/score", {})
            assert (got.status, got.headers["x-ms-run-function-failed"]) == (500, "True")
            assert got.json["message"].startswith("An unexpected error occurred in scoring script")


def test_a_script_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with hosted("azureml", {**environment(tmp_path, PLAIN), "SCORING_TIMEOUT_MS": "50"}) as port:
        wait_until_healthy(port)
        got = ask(port, "POST", "/score", {"kind": "wait", "until": str(tmp_path / "enough"), "data": []})
        (tmp_path / "enough").touch()
        assert (got.status, got.json) == (500, {"message": "Scoring timeout after 50 ms"})
        assert got.headers["x-ms-run-function-failed"] == "True"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("def init(): raise RuntimeError('no weights')\ndef run(data): pass", "RuntimeError: no weights"),
        ("def init(): pass", "does not define run"),
        ("def init(): pass\ndef run(): pass", "needs to accept an argument"),
        ("def init(): pass\ndef run(*rows): pass", "positional-only"),
        ("import nothing_like_this", "nothing_like_this"),
        ("def run(", "SyntaxError"),
        ("import sys\ndef init(): sys.exit(1)\ndef run(data): pass", "SystemExit"),
    ],
)
def test_a_script_that_cannot_start_says_so_on_every_route(tmp_path: Path, script: str, words: str) -> None:
    with hosted("azureml", environment(tmp_path, script)) as port:
        got = ask(port, "GET", "/")
        while "being loaded" in got.json["message"]:
            got = ask(port, "GET", "/")
        assert got.status == 503
        assert words in got.json["message"]
        assert ask(port, "GET", "/v2/health/ready").status == 503
        assert ask(port, "GET", "/v2/health/live").status == 200
        scored = ask(port, "POST", "/score", {"data": []})
        assert scored.status == 503
        assert words in scored.json["message"]


def test_probes_are_answered_while_the_script_loads(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"def init():\n    with open({str(gate)!r}) as gate: gate.read()\ndef run(data): return 1\n"
    with hosted("azureml", environment(tmp_path, script)) as port:
        assert ask(port, "GET", "/v2/health/live").status == 200
        assert ask(port, "GET", "/v2/health/ready").status == 503
        assert "being loaded" in ask(port, "GET", "/").json["message"]
        assert ask(port, "POST", "/score", {}).status == 503
        gate.write_text("go")  # opening it waits for the script to read
        wait_until_healthy(port)
        assert ask(port, "GET", "/v2/health/ready").status == 200
        assert ask(port, "POST", "/score", {}).json == 1


def test_a_refusal_gives_its_reason_in_the_body_since_the_status_becomes_424(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "models")}) as port:
        for path, body in (("/score", b"{"), ("/v2/models/scale/infer", b"{"), ("/v2/models/none/infer", b"{}")):
            got = ask(port, "POST", path, body)
            assert 400 <= got.status <= 500
            assert got.json["error"]


def test_answers_depend_on_neither_origin_nor_connection_headers(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "models")}) as port:
        plain = ask(port, "POST", "/score", v2_request([[1.0, 2.0, 3.0, 4.0]]))
        assert plain.status == 200
        for headers in ({"Origin": "https://example.com"}, {"Connection": "close"}, {"Connection": "keep-alive"}):
            got = ask(port, "POST", "/score", v2_request([[1.0, 2.0, 3.0, 4.0]]), headers)
            assert (got.status, got.body) == (200, plain.body)
            assert not [name for name in got.headers if name.startswith("access-control")]


def test_pages_of_the_origins_that_were_named_may_read_answers_and_ask_first(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    environ = {
        "AZUREML_MODEL_DIR": str(tmp_path / "models"),
        "AML_CORS_ORIGINS": "https://a.example, https://b.example",
    }
    with hosted("azureml", environ) as port:
        for _ in range(2):  # what is worked out for a head is remembered with it
            for origin, told in ((PAGE["Origin"], PAGE["Origin"]), ("https://c.example", None)):
                got = ask(port, "POST", "/score", v2_request([[1.0, 2.0, 3.0, 4.0]]), {"Origin": origin})
                assert (got.status, got.headers.get("access-control-allow-origin")) == (200, told)
        first = ask(port, "OPTIONS", "/score", headers={**PAGE, **ASKED})
        assert first.status == 200
        assert first.headers["access-control-allow-methods"] == "GET, POST"
        assert first.headers["access-control-allow-headers"] == "content-type, x-b"
        assert first.headers["vary"] == "Origin"


COUNTING = """
import json

def init():
    global runs
    runs = []

def run(data):
    runs.append(data)
    if data == "held":
        open({started!r}, "w").close()
        with open({gate!r}) as gate: gate.read()
    return runs
"""


@pytest.mark.parametrize("left", ["by its own will", "since it took too long"])
def test_what_waited_for_its_turn_is_not_run_once_its_client_has_gone(tmp_path: Path, left: str) -> None:
    gate, started = tmp_path / "gate", tmp_path / "started"
    os.mkfifo(gate)
    os.mkfifo(started)
    variables = environment(tmp_path, COUNTING.format(gate=str(gate), started=str(started)))
    limit = {} if left == "by its own will" else {"SCORING_TIMEOUT_MS": "300"}
    with hosted("azureml", variables | limit) as port:
        wait_until_healthy(port)
        held = threading.Thread(target=ask, args=(port, "POST", "/score", b"held"))
        held.start()
        started.read_text()  # its turn has begun
        if left == "by its own will":
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nleft")
                assert ask(port, "GET", "/").status == 200  # what came before has been read
            for _ in range(2):
                assert ask(port, "GET", "/").status == 200  # and its end noticed
        else:
            assert "timeout" in ask(port, "POST", "/score", b"left").json["message"]
        gate.write_text("go")
        held.join()
        while not isinstance(runs := ask(port, "POST", "/score", b"stays").json, list):
            assert limit, "it took too long itself, which it may where there is a limit"
        assert (runs[0], set(runs[1:])) == ("held", {"stays"})


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, f"remora/{__version__}"),
        ({"HTTP_X_MS_SERVER_VERSION": "mine 2"}, "mine 2"),
        ({"SERVER_VERSION_LOG_RESPONSE_ENABLED": "False"}, None),
    ],
)
def test_answers_say_which_server_it_was_unless_told_not_to(
    tmp_path: Path, variables: dict[str, str], told: str | None
) -> None:
    write_scale(tmp_path / "models" / "scale")
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "models"), **variables}) as port:
        for _ in range(2):
            got = ask(port, "POST", "/score", v2_request([[1.0, 2.0, 3.0, 4.0]]))
            assert (got.status, got.headers.get("x-ms-server-version")) == (200, told)


def test_one_run_at_a_time_unless_more_workers_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "import threading\nbusy = threading.Semaphore(1)\ndef init(): pass\ndef run(data):\n"
        "    alone = busy.acquire(blocking=False)\n    threading.Event().wait(0.02)\n"
        "    alone and busy.release()\n    return alone\n"
    )
    script = EntryScript(tmp_path / "score.py")
    script.open()
    bodies: list[bytes] = []
    request = AMLRequest("POST", "/score", "", [], b"1")
    threads = [threading.Thread(target=lambda: bodies.append(script.score(request).body)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bodies == [b"true"] * 4


# -- without a script -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "repository", "outer/repository"])
def test_models_are_found_below_the_registered_folder(tmp_path: Path, inner: str) -> None:
    write_scale(tmp_path / "digits" / "7" / inner / "scale")
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "digits" / "7")}) as port:
        for path in ("/score", "/v2/models/scale/infer"):
            assert ask(port, "POST", path, v2_request([[1, 2, 3, 4]])).json["outputs"][0]["data"] == [2, 4, 6, 8]
        assert ask(port, "GET", "/").body == b"Healthy"
        assert ask(port, "GET", "/score").status == 405


def test_a_bare_model_is_called_what_it_was_registered_as(tmp_path: Path) -> None:
    mounted = tmp_path / "digits" / "7"
    write_scale(mounted)
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(mounted)}) as port:
        assert ask(port, "GET", "/v2/models/digits/ready").status == 200


def test_binary_tensors_and_ids_pass_through_score(tmp_path: Path) -> None:
    write_scale(tmp_path / "m" / "1" / "scale")
    data = np.array([1, 2, 3, 4], np.float32).tobytes()
    spec = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}}).encode()
    told = {"Inference-Header-Content-Length": str(len(header)), "x-ms-client-request-id": "mine"}
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "m" / "1")}) as port:
        for _ in range(2):
            got = ask(port, "POST", "/score", header + data, told)
            length = int(got.headers["inference-header-content-length"])
            assert np.frombuffer(got.body[length:], np.float32).tolist() == [2, 4, 6, 8]
            assert got.headers["x-ms-client-request-id"] == "mine"


def test_metrics_are_on_the_one_port_for_those_who_may_see_them(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    host = azureml.host({"AZUREML_MODEL_DIR": str(tmp_path / "models")})
    with running(host) as ports:
        ask(ports.http, "POST", "/score", v2_request([[1, 2, 3, 4]]))
        assert b'nv_inference_request_success{model="scale",version="1"} 1' in ask(ports.http, "GET", "/metrics").body
    locked = replace(host.server, http_restricted_api=("statistics:api-key=secret",))
    with running(replace(host, server=locked)) as ports:
        assert ask(ports.http, "GET", "/metrics").status == 403
        assert ask(ports.http, "GET", "/metrics", headers={"api-key": "secret"}).status == 200


def test_score_with_several_models_says_what_to_do(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_scale(tmp_path / "m" / "1" / name)
    environ = {"AZUREML_MODEL_DIR": str(tmp_path / "m" / "1")}
    with hosted("azureml", environ) as port:
        got = ask(port, "POST", "/score", v2_request([[1, 2, 3, 4]]))
        assert got.status == 404
        assert "REMORA_DEFAULT_MODEL" in got.json["message"]
    with hosted("azureml", {**environ, "REMORA_DEFAULT_MODEL": "b"}) as port:
        assert ask(port, "POST", "/score", v2_request([[1, 2, 3, 4]])).json["model_name"] == "b"


# -- documents ---------------------------------------------------------------------------------------------------------


class SchemaUtil:
    """What inference_schema knows of a script whose decorators only the newer documents can say."""

    def get_supported_versions(self, run: object) -> list[str]:
        return ["3.0", "3.1"]

    def get_input_schema(self, run: object) -> dict[str, Any]:
        return {"type": "object", "example": {"data": [1.0]}}

    def get_output_schema(self, run: object) -> dict[str, Any]:
        return {"type": "number"}


def test_documents_say_what_the_script_takes_and_what_the_deployment_is_called(tmp_path: Path) -> None:
    schemas = schemas_of(print, SchemaUtil())
    named = Named("digits", "7", "/api/")
    for version, number in (("3", "3.0.3"), ("3.0", "3.0.3"), ("3.1", "3.1.0")):
        document = json.loads(find_document(version, tmp_path, named, schemas))
        assert (document["openapi"], document["info"]["title"], document["info"]["version"]) == (number, "digits", "7")
        assert set(document["paths"]) == {"/api/", "/api/score", "/api/swagger.json"}
        assert document["components"]["schemas"]["ServiceInput"]["example"] == {"data": [1.0]}
        assert document["components"]["schemas"]["ServiceOutput"] == {"type": "number"}
    old = json.loads(find_document("2", tmp_path, Named(), ANYTHING))
    assert (old["swagger"], old["info"]["title"], set(old["paths"])) == (
        "2.0",
        "ML service",
        {"/", "/score", "/swagger.json"},
    )


def test_a_document_that_cannot_be_is_refused_with_those_that_can(tmp_path: Path) -> None:
    schemas = schemas_of(print, SchemaUtil())
    with pytest.raises(NoDocumentError, match=r"not supported for the scoring script.*: \[3, 3\.1\]"):
        find_document("2", tmp_path, Named(), schemas)
    (tmp_path / "swagger2.json").write_text("{}")
    assert find_document("2.0", tmp_path, Named(), schemas) == b"{}"
    with pytest.raises(NoDocumentError, match=r"\[9\] is not valid.*: \[2, 3, 3\.1\]"):
        find_document("9", tmp_path, Named(), schemas)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_the_port_is_azures_or_what_it_says() -> None:
    assert azureml.host({}).server.http_port == 5001
    assert azureml.host({"SERVER_PORT": "8080"}).server.http_port == 8080
    assert azureml.host({}).server.http_address == "0.0.0.0"
    for text in ("0", "-1", "x", "9" * 30, "²", "70000", "1" + "0" * 30):
        with pytest.raises(ValueError, match="SERVER_PORT"):
            azureml.host({"SERVER_PORT": text})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HEALTH_PORT", "70000"),
        ("SCORING_TIMEOUT_MS", "1" + "0" * 30),
        ("WORKER_COUNT", "1" + "0" * 30),
        ("AZUREML_LOG_LEVEL", "LOUD"),
        ("AML_CORS_ORIGINS", r"https://.*\.example"),
        ("AML_CORS_ORIGINS", "https://a.example\r\nSet-Cookie: a=b"),
        ("HTTP_X_MS_SERVER_VERSION", "1.0\r\nSet-Cookie: a=b"),
        ("HTTP_X_MS_SERVER_VERSION", "\u7248"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused_by_its_name(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=variable):
        azureml.host({"SEPERATE_HEALTH_ENDPOINT": "true", variable: text})


def test_a_file_says_what_no_variable_does(tmp_path: Path) -> None:
    named = tmp_path / "azure.json"
    named.write_text(
        '{"SERVER_PORT": 8080, "SEPERATE_HEALTH_ENDPOINT": true, "HEALTH_PORT": "8081", "layers": {"a": 1}}'
    )
    host = azureml.host({"AZUREML_CONFIG_FILE": str(named), "HEALTH_PORT": "8082"})
    assert (host.server.http_port, [door.port for door in host.doors]) == (8080, [8082])
    beside = tmp_path / "code" / "config.json"
    beside.parent.mkdir()
    beside.touch()  # an empty one is none
    environ = {"AML_APP_ROOT": str(tmp_path), "AZUREML_ENTRY_SCRIPT": "code/score.py"}
    assert azureml.host(environ).server.http_port == 5001
    beside.write_text('{"SERVER_PORT": "8083"}')
    assert azureml.host(environ).server.http_port == 8083


@pytest.mark.parametrize("text", ["", "{", "[]", None])
def test_a_file_of_settings_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "azure.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"AZUREML_CONFIG_FILE: .*azure\.json"):
        azureml.host({"AZUREML_CONFIG_FILE": str(path)})


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("", (0, True, True, True)),
        ("DEBUG", (1, True, True, True)),
        ("info", (0, True, True, True)),
        ("WARNING", (0, False, True, True)),
        ("ERROR", (0, False, False, True)),
        ("CRITICAL", (0, False, False, False)),
    ],
)
def test_the_log_has_azures_level(level: str, shown: tuple[int, bool, bool, bool]) -> None:
    server = azureml.host({"AZUREML_LOG_LEVEL": level}).server
    assert (server.log_verbose, server.log_info, server.log_warning, server.log_error) == shown


def test_a_variable_that_does_nothing_here_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"AML_APP_INSIGHTS_ENABLED": "true", "AML_MODEL_DC_STORAGE_ENABLED": "False"}
    with hosted("azureml", environment(tmp_path, PLAIN) | said) as port:
        wait_until_healthy(port)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split()[0] for line in warned] == ["AML_APP_INSIGHTS_ENABLED"]


def test_health_may_have_a_port_of_its_own(tmp_path: Path) -> None:
    write_scale(tmp_path / "m" / "1" / "scale")
    variables = {"AZUREML_MODEL_DIR": str(tmp_path / "m" / "1"), "SEPERATE_HEALTH_ENDPOINT": "true"}
    with running(azureml.host(variables)) as ports:
        (health,) = ports.doors
        assert ask(health, "GET", "/").body == b"Healthy"


def test_the_port_for_health_is_not_healthy_before_the_script_is(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"def init():\n    with open({str(gate)!r}) as gate: gate.read()\ndef run(data): return 1\n"
    variables = environment(tmp_path, script) | {"SEPERATE_HEALTH_ENDPOINT": "true"}
    with running(azureml.host(variables)) as ports:
        (health,) = ports.doors
        before = ask(health, "GET", "/")
        gate.write_text("go")  # opening it waits for the script to read
        wait_until_healthy(health)
        assert ask(ports.http, "POST", "/score", {}).json == 1
    assert (before.status, before.json) == (503, {"message": "the scoring script is being loaded"})


def test_it_starts_as_a_module_and_ends_when_told(tmp_path: Path, child_environment: dict[str, str]) -> None:
    (port,) = free_ports(1)
    variables = child_environment | environment(tmp_path, PLAIN) | {"SERVER_PORT": str(port)}
    command = [sys.executable, "-m", "remora_adapters.azureml", "--http-address=127.0.0.1"]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until_healthy(port)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


# -- requests and responses of scripts --------------------------------------------------------------------------------


@given(st.binary(max_size=200).filter(lambda data: b"--b" not in data), st.text("abc.é", min_size=1, max_size=9))
def test_a_forms_file_arrives_as_it_was_sent(data: bytes, note: str) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\n' + data + b"\r\n"
    body += b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\n' + note.encode() + b"\r\n--b--\r\n"
    request = AMLRequest("POST", "/score", "", [("Content-Type", "multipart/form-data; boundary=b")], body)
    assert request.files["f"].read() == data
    assert request.form["n"] == note


@given(st.dictionaries(st.text("abc", min_size=1), st.lists(st.text(max_size=5), min_size=1, max_size=3)))
def test_a_querys_values_are_all_there(query: dict[str, list[str]]) -> None:
    from urllib.parse import urlencode

    request = AMLRequest("GET", "/score", urlencode(query, doseq=True), [], b"")
    assert {key: request.args.getlist(key) for key in request.args} == query


def test_a_request_has_its_headers_and_values_as_flask_has_them() -> None:
    sent = [("x-given", "1"), ("ACCEPT", "a"), ("accept", "b"), ("Host", "h:1")]
    request = AMLRequest("POST", "/score", "n=3&n=x", sent, b"")
    assert dict(request.headers) == {"X-Given": "1", "Accept": "a,b", "Host": "h:1"}
    assert list(request.headers) == list(request.headers.items())
    assert (request.headers["x-GIVEN"], request.headers.get("x-given", type=int)) == ("1", 1)
    assert (request.headers.get("none"), request.headers.get("accept", 5, type=int)) == (None, 5)
    assert (request.args.get("n", type=int), request.args.get("none", 2, type=int)) == (3, 2)
    assert request.args.to_dict(flat=False) == {"n": ["3", "x"]} == dict(request.args.lists())
    assert request.base_url == "http://h:1/score"


def test_a_file_of_a_form_is_read_as_any_file(tmp_path: Path) -> None:
    file = UploadedFile("rows", "rows.csv", "text/csv", b"a,b\n1,2\n")
    assert list(file) == [b"a,b\n", b"1,2\n"]
    file.stream.seek(0)
    assert file.read(3) == b"a,b"
    file.save(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == b"a,b\n1,2\n"


def test_header_values_are_split_at_commas_as_azure_does() -> None:
    assert AMLResponse("", 200, {"A": "1, 2"}).headers.get_all("A") == ["1", "2"]


def test_azures_names_lead_to_our_request_and_response() -> None:
    modules: dict[str, Any] = {}
    register_modules(modules)
    for package in ("azureml.contrib.services", "azureml_inference_server_http.api"):
        assert modules[f"{package}.aml_request"].AMLRequest is AMLRequest
        assert modules[package].aml_response.AMLResponse is AMLResponse


def test_the_document_is_behind_the_lock_of_metadata(tmp_path: Path) -> None:
    host = azureml.host({"AZUREML_MODEL_DIR": str(write_scale(tmp_path / "models" / "scale").parent)})
    locked = replace(host.server, http_restricted_api=("metadata:key=value",))
    with running(replace(host, server=locked)) as ports:
        assert ask(ports.http, "GET", "/swagger.json").status == 403
        assert ask(ports.http, "GET", "/swagger.json", headers={"key": "value"}).status != 403
