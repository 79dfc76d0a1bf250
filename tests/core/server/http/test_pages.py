"""HTML pages: true content, no injection, and restrictions."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shlex
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.options import EngineOptions, ServerOptions
from remora.server.http import pages
from remora.server.http.asgi import create_app
from remora.server.http.pages import (
    curl_line,
    example_of,
    paths_of,
    prefers_html,
    status,
    status_page,
)
from remora.server.main import Server
from support.process.eventually import eventually
from support.wire.page_requests import (
    HOSTILE,
    HOSTILE_FOLDER,
    PATIENCE_S,
    QUOTING_FOLDER,
    Ask,
    get,
    httpx,
    infer_body,
    through_app,
)

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")


# -- the pages ------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """What a browser would make of a page: its tags, their attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_docs_page_names_models_tensors_and_commands(engine: Engine) -> None:
    got = get(engine, "/v2/docs")
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    page = Tags(got.text)
    for told in ("rows", "version 2", "FP32", "[-1, 4]", "curl http://served.test/v2/models/rows/infer"):
        assert told in page.text, told
    assert ("href", "openapi.json") in page.attributes


@pytest.mark.parametrize("path", ["/v2/docs", "/v2/status"])
def test_a_page_asks_nothing_of_other_places_and_runs_nothing(engine: Engine, path: str) -> None:
    got = get(engine, path, accept="text/html")
    page = Tags(got.text)
    assert not {"script", "img", "link", "iframe", "form"} & set(page.tags)
    assert not [value for name, value in page.attributes if name == "src" or name.startswith("on")]
    assert {value for name, value in page.attributes if name == "href"} == {"docs", "status", "openapi.json"}
    assert "default-src 'none'" in got.headers["content-security-policy"]
    assert got.headers["x-content-type-options"] == "nosniff"


def test_a_browser_gets_the_application_at_the_root_and_other_clients_get_tritons_answer(engine: Engine) -> None:
    got = get(engine, "/", accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (got.status, got.headers["content-type"]) == (200, "text/html; charset=utf-8")
    other = get(engine, "/")
    assert (other.status, other.text) == (404, '{"error":"Not Found"}')


def test_the_application_is_one_small_file_that_needs_no_other_place(engine: Engine) -> None:
    got = get(engine, "/", accept="text/html")
    assert len(got.body) < 150_000
    assert not re.findall(r"""(?:src|href|url\()=?["']?(?:https?:)?//""", got.text)
    assert not [name for name, value in Tags(got.text).attributes if name.startswith("on")]


def test_only_the_script_of_the_application_may_run_and_only_against_its_server(engine: Engine) -> None:
    got = get(engine, "/", accept="text/html")
    script = got.text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = got.headers["content-security-policy"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "connect-src 'self'" in policy
    assert "default-src 'none'" in policy


def test_what_models_say_of_themselves_is_text_on_every_page(engine: Engine) -> None:
    docs, state = (Tags(get(engine, path, accept="text/html").text) for path in ("/v2/docs", "/v2/status"))
    assert HOSTILE in docs.text
    assert HOSTILE_FOLDER in state.text


def test_the_reason_of_a_failure_is_text_too() -> None:
    model = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": HOSTILE}
    page = status_page({"server": {"name": HOSTILE, "version": HOSTILE, "ready": False}, "models": [model]})
    assert "script" not in Tags(page).tags
    assert Tags(page).text.count(HOSTILE) == 3


@pytest.mark.parametrize("host", ["a.test/<b>", '"><b>', "$(id)", ""])
def test_a_host_header_that_is_not_a_host_is_not_shown(engine: Engine, host: str) -> None:
    got = get(engine, "/v2/docs", host=host)
    page = Tags(got.text)
    assert "b" not in page.tags
    assert f"http://{host}/" not in page.text
    assert "http://localhost:8000/v2/models/rows/infer" in page.text


def test_a_command_is_one_for_the_shell_whatever_the_names_in_it(engine: Engine) -> None:
    model, path = next((model, path) for model, path in paths_of(engine) if model.name == QUOTING_FOLDER)
    line = curl_line(example_of(model), f"http://served.test{path}/infer")
    words = shlex.split(line)
    assert words[:2] == ["curl", f"http://served.test/v2/models/{QUOTING_FOLDER}/infer"]
    assert json.loads(words[words.index("-d") + 1]) == example_of(model).header


def test_a_binary_command_sends_what_it_says(engine: Engine) -> None:
    example = example_of(engine.resolve("half"))
    line = curl_line(example, "http://served.test/x")
    shell = f'curl() {{ printf "%s\\n" "$@" >&2; cat; }}; {line}'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, check=True)
    assert done.stdout == json.dumps(example.header, separators=(",", ":")).encode() + bytes(6)
    assert f"Inference-Header-Content-Length: {len(done.stdout) - 6}" in done.stderr.decode().splitlines()


def test_the_status_tells_what_models_did(repository: Path) -> None:
    with Engine(repository) as running:
        before = {(row["name"], row["version"]): row for row in status(running)["models"]}
        asks = [Ask("POST", "/v2/models/rows/infer", infer_body(rows)) for rows in (1, 2, 9)]
        assert [got.status for got in through_app(running, *asks)] == [200, 200, 400]
        eventually(lambda: not running.running)  # a request counts until its answer is delivered
        found = json.loads(get(running, "/v2/status").body)
    assert found["server"]["ready"] is True
    after = {(row["name"], row["version"]): row for row in found["models"]}
    assert before["rows", "2"]["inferences"] == 0
    row = after["rows", "2"]
    assert row["state"] == "READY"
    assert row["load_ms"] > 0
    assert (row["requests"]["success"], row["inferences"], row["executions"]) == (2, 3, 2)
    assert row["batches"] == {"1": 1, "2": 1}
    assert row["batch_cost_us"].keys() == {"1", "2"}
    assert sum(row["dispatches"].values()) == 2
    assert row["queue"] == {"waiting": 0, "running": 0}


def test_the_status_names_models_that_are_not_loaded(repository: Path) -> None:
    with Engine(options=EngineOptions(model_repository=(repository,), model_control_mode="explicit")) as running:
        names = [row["name"] for row in status(running)["models"]]
        assert "rows" in names
        assert "rows" in Tags(get(running, "/v2/status", accept="text/html").text).text
        assert "No model is ready" in get(running, "/v2/docs").text


@pytest.mark.parametrize(
    ("accept", "wants"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("text/html", True),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True),
        ("application/json, text/html;q=0.5", False),
        ("application/json;q=0.5, TEXT/HTML", True),
        ("text/html;q=0", False),
        ("text/html;q=nonsense", False),
    ],
)
def test_the_status_comes_as_html_only_for_those_who_ask(accept: str, wants: bool) -> None:
    assert prefers_html(accept) is wants


def test_metrics_are_on_the_port_of_the_requests(engine: Engine) -> None:
    got = get(engine, "/v2/metrics")
    assert got.headers["content-type"].startswith("text/plain")
    assert 'nv_inference_count{model="rows"' in got.text


# -- on our own connections -----------------------------------------------------------------------------------------


def test_pages_are_served_on_our_own_connections_without_fastapi(
    repository: Path, child_environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(repository), infer_body().decode()],
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "200 /v2/models/rows/infer fastapi: False",
        "200 /v2/metrics fastapi: False",
        "404 /v2/other fastapi: False",
        "200 /v2/docs fastapi: False",
        "200 /v2/openapi.json fastapi: False",
        "200 /v2/status fastapi: False",
    ]


PROGRAM = """
import asyncio, sys
from pathlib import Path
from remora.engine import Engine
from remora.options import ServerOptions
from remora.server.main import Server

async def main():
    server = Server(Engine(Path(sys.argv[1])), ServerOptions(http_port=0, metrics_port=0, allow_grpc=False))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports.http)
    body = sys.argv[2]
    head = f"POST /v2/models/rows/infer HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}"
    post = f"{head}\\r\\n\\r\\n{body}"
    paths = ("/v2/metrics", "/v2/other", "/v2/docs", "/v2/openapi.json", "/v2/status")
    for request in (post, *(f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n" for path in paths)):
        writer.write(request.encode())
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\\r\\n")[0])
        await reader.readexactly(length)
        print(head.split(b" ")[1].decode(), request.split(" ")[1], "fastapi:", "fastapi" in sys.modules)
    writer.close()
    await server.stop()

asyncio.run(main())
"""


def test_restrictions_hold_in_any_asgi_host_for_v2_and_pages(engine: Engine) -> None:
    locked = ServerOptions(http_restricted_api=("inference,metadata:api-key=secret",))
    asks = [Ask("POST", "/v2/models/rows/infer", infer_body()), Ask("GET", "/v2/docs"), Ask("GET", "/v2/status")]
    for got in through_app(engine, *asks, options=locked):
        assert got.status == 403
        assert "secret" not in got.text
    with_secret = [ask._replace(headers=(("api-key", "secret"),)) for ask in asks]
    assert [got.status for got in through_app(engine, *with_secret, options=locked)] == [200, 200, 200]
    assert through_app(engine, Ask("GET", "/v2/health/live"), options=locked)[0].status == 200
    nowhere = through_app(engine, Ask("GET", "/nowhere"), Ask("GET", "/v2/models"), options=locked)
    assert [got.status for got in nowhere] == [404, 404], "a path without a route needs no key"


@pytest.mark.parametrize("secret", ["", "@/run/secrets/key"])
def test_a_program_gives_the_secret_itself(engine: Engine, secret: str) -> None:
    with pytest.raises(ValueError, match="--http-restricted-api"):
        create_app(engine, ServerOptions(http_restricted_api=(f"metadata:api-key={secret}",)))


def test_a_page_takes_no_other_methods_than_get_and_head(engine: Engine) -> None:
    (got,) = through_app(engine, Ask("POST", "/v2/docs"))
    assert (got.status, got.headers["allow"]) == (405, "GET, HEAD")


def test_inference_is_answered_while_a_page_is_rendered(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendering, may_render = threading.Event(), threading.Event()

    def slow(_engine: Engine) -> dict[str, Any]:
        rendering.set()
        assert may_render.wait(PATIENCE_S)
        return {}

    monkeypatch.setattr(pages, "status", slow)

    async def talk() -> None:
        options = ServerOptions(http_port=0, allow_grpc=False, allow_metrics=False)
        server = Server(Engine(repository), options)
        await server.start()
        origin = f"http://127.0.0.1:{server.ports.http}"
        async with httpx.AsyncClient(base_url=origin, timeout=PATIENCE_S) as client:
            page = asyncio.create_task(client.get("/v2/status"))
            await asyncio.to_thread(rendering.wait, PATIENCE_S)
            assert (await client.post("/v2/models/rows/infer", content=infer_body())).status_code == 200
            assert not page.done()
            may_render.set()
            assert (await page).json() == {}
        await server.stop()

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))


def test_a_page_that_fails_is_an_internal_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_engine: Engine) -> dict[str, Any]:
        raise KeyError("secret")

    monkeypatch.setattr(pages, "status", fail)
    got = get(engine, "/v2/status")
    assert (got.status, json.loads(got.body)) == (500, {"error": "internal error: see the server's log"})
    records = [record for record in caplog.records if record.name.startswith("remora")]
    assert [record.levelname for record in records] == ["ERROR"]
