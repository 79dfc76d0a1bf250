"""Scoring scripts on remora, and the same requests on Azure's own server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT, end, free_ports
from remora import __version__
from remora_adapters import azureml
from remora_adapters.azureml.entry_script import EntryScript
from remora_adapters.azureml.raw_http import AMLRequest
from support.servers.azure_scripts import PLAIN, Case, Deployed, deployed, environment, wait_until_healthy
from support.servers.hosting import Got, ask, hosted, running, v2_request, write_scale
from support.servers.live_server import reset_at_close

REFERENCE = Path(os.environ.get("REMORA_AZUREML_VENV", ROOT / ".venv-azureml"))
"""An environment with azureml-inference-server-http: `make test-azureml`."""
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


@pytest.fixture(params=[name for name, what in CASES.items() if "inference_schema" not in what.script])
def scored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A script's name, and our port that runs it."""
    with hosted("azureml", deployed(tmp_path, CASES[request.param])) as port:
        wait_until_healthy(port)
        yield request.param, port


def test_a_post_to_the_root_runs_the_script_as_one_to_score(tmp_path: Path) -> None:
    """Azure's own server refuses it, because its scoring route is /score; that of remora's deployments is /."""
    with hosted("azureml", deployed(tmp_path, CASES["plain"])) as port:
        wait_until_healthy(port)
        answers = [ask(port, "POST", path, b'{"data": [1, 2.5]}', JSON) for path in ("/", "/score")]
        assert [each.status for each in answers] == [200, 200]
        assert answers[0].body == answers[1].body


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
    limit = {} if left == "by its own will" else {"SCORING_TIMEOUT_MS": "2000"}
    with hosted("azureml", variables | limit) as port:
        wait_until_healthy(port)
        held = threading.Thread(target=ask, args=(port, "POST", "/score", b"held"))
        held.start()
        started.read_text()  # its turn has begun
        if left == "by its own will":
            with socket.create_connection(("127.0.0.1", port)) as client:
                reset_at_close(client)
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
def test_answers_name_the_server_unless_that_is_disabled(
    tmp_path: Path, variables: dict[str, str], told: str | None
) -> None:
    write_scale(tmp_path / "models" / "scale")
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "models"), **variables}) as port:
        for _ in range(2):
            got = ask(port, "POST", "/score", v2_request([[1.0, 2.0, 3.0, 4.0]]))
            assert (got.status, got.headers.get("x-ms-server-version")) == (200, told)


def test_one_run_at_a_time_unless_more_workers_are_configured(tmp_path: Path) -> None:
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
