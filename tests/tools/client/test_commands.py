"""The commands that talk to a server: a small real one over sockets, and ones that answer nonsense."""

from __future__ import annotations

import argparse
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports, needs
from remora.cli import command_parsers, main
from remora.cli.client import ApiAnswer, EngineClient, HttpClient, model_path, raise_for_status, request_headers
from remora.engine import Engine
from remora.errors import NotFoundError, RemoraError, UnavailableError
from remora.messages import InferForm, Request, Ticket
from remora.options import EngineOptions
from remora.plugins import COMMANDS as ROWS
from remora.plugins import is_present
from remora_tools.traffic.captured import CapturedTensor, Exchange, line_of
from support.engine.fakes import UNTRACED
from support.process.eventually import eventually

Captured = pytest.CaptureFixture[str]
Respond = Callable[[str, str, bytes, int | None], ApiAnswer]

_LENGTH = "Inference-Header-Content-Length"
METADATA = {
    "name": "m",
    "versions": ["1"],
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
}


class Server(ThreadingHTTPServer):
    """Waits for its threads when it is closed; a client that has hung up is expected."""

    daemon_threads = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def served(respond: Respond, seen: list[dict[str, str]] | None = None) -> Iterator[str]:
    """The URL of an HTTP server on a free port that answers with what ``respond(method, path, body, length)`` gives.

    The headers of each request are added to ``seen``, by their names in lower case.
    """

    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = self.headers.get(_LENGTH)
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if seen is not None:
                seen.append({name.lower(): value for name, value in self.headers.items()})
            answer = respond(self.command, self.path, body, None if length is None else int(length))
            self.send_response(answer.status)
            if answer.header_length is not None:
                self.send_header(_LENGTH, str(answer.header_length))
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_POST = answer  # noqa: N815 - the names that http.server looks for

        def log_message(self, *_: Any) -> None:
            """Tests speak for themselves."""

    with Server(("127.0.0.1", 0), Exchange) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def always(status: int, body: bytes) -> Respond:
    return lambda method, path, sent, length: ApiAnswer(status, None, body)


def written(answer: object) -> ApiAnswer:
    return ApiAnswer(200, None, json.dumps(answer).encode())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over a real engine in explicit mode: `neg` is loaded, `late` is not, `stray` cannot be."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from remora.engine import Engine

    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    root = tmp_path_factory.mktemp("models")
    for name, content in (("neg", model), ("late", model), ("stray", b"no model")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.onnx").write_bytes(content)
    with (
        Engine(root, model_control_mode="explicit", load_model=("neg",)) as engine,
        served(EngineClient(engine, 30.0).exchange) as url,
    ):
        yield url


def run(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


# -- a server that is well --------------------------------------------------------------------------------------------


def test_an_inference_goes_over_the_wire_and_back(url: str, capsys: Captured) -> None:
    code, out, err = run(
        capsys, "infer", "neg", "--url", url, "--input", "x=1,2,3,4,5,6", "--repeat", "3", "--json-out"
    )
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, 3], "data": [-1, -2, -3, -4, -5, -6]}]


def test_a_url_needs_no_scheme_and_may_end_in_a_slash(url: str, capsys: Captured) -> None:
    for spelling in (url.removeprefix("http://"), f"{url}/"):
        assert run(capsys, "infer", "neg", "--url", spelling, "--random", "--version", "1")[0] == 0


def test_the_list_has_versions_states_and_models_never_loaded(url: str, capsys: Captured) -> None:
    _, out, _ = run(capsys, "models", "list", "--url", url)
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["model", "version", "state", "reason"]
    assert ["neg", "1", "READY"] in rows
    _, out, _ = run(capsys, "models", "list", "--url", url, "--ready", "--json-out")
    assert {"name": "neg", "version": "1", "state": "READY"} in json.loads(out)


def test_a_model_is_loaded_with_another_configuration_and_unloaded(url: str, tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("max_batch_size: 3\n")
    code, out, _ = run(capsys, "models", "load", "late", "--url", url, "--config", str(config))
    assert code == 0
    assert out.splitlines()[1].split() == ["late", "1", "READY"]
    client = HttpClient(url, 30.0)
    assert json.loads(client.exchange("GET", "/v2/models/late/config").body)["max_batch_size"] == 3
    client.close()
    code, out, _ = run(capsys, "models", "unload", "late", "--url", url, "--dependents")
    assert code == 0
    assert out.splitlines()[1].split()[:3] in (["late", "1", "UNLOADING"], ["late", "1", "UNAVAILABLE"])

    def listed() -> list[str]:
        code, out, _ = run(capsys, "models", "list", "late", "--url", url)
        assert code == 0
        return out.splitlines()[1].split()

    eventually(lambda: listed() == ["late", "1", "UNAVAILABLE", "unloaded"])  # the model closes in another thread


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("models", "load", "stray"), "load failed for model 'stray'"),
        (("models", "list", "none"), "has no model 'none'"),
        (("models", "list", "none", "--ready"), "has no ready model 'none'"),
        (("models", "load", "a b"), "invalid model name 'a b'"),
        (("models", "load", "neg", "--config", "missing.pbtxt"), "missing.pbtxt: cannot be read"),
        (("infer", "none", "--random"), "Request for unknown model: 'none' is not found"),
        (("infer", "neg", "--random", "--output", "z"), "unexpected inference output 'z'"),
    ],
)
def test_the_servers_reason_is_the_last_word(arguments: tuple[str, ...], said: str, url: str, capsys: Captured) -> None:
    code, out, err = run(capsys, *arguments, "--url", url)
    assert (code, out) == (1, "")
    assert err.startswith(f"remora {arguments[0]}")
    assert said in err
    assert err.count("\n") == 1


def test_a_load_of_an_unknown_model_names_the_nearest_one(url: str, capsys: Captured) -> None:
    code, _, err = run(capsys, "models", "load", "strai", "--url", url)
    assert code == 1
    reason = "cannot load 'strai': the repository of this server has no such model; did you mean 'stray'?"
    assert re.fullmatch(rf"remora models load: \S+ {re.escape(reason)}\n", err)


def test_a_load_where_clients_may_load_nothing_names_the_mode_to_start_with(capsys: Captured) -> None:
    refusal = b'{"error":"explicit model load / unload is not allowed if polling is enabled"}'
    with served(always(503, refusal)) as url:
        code, _, err = run(capsys, "models", "load", "m", "--url", url)
    assert code == 1
    assert "start it with --model-control-mode=explicit" in err.splitlines()[0]
    assert "polling" not in err


def test_a_reason_that_only_the_index_has_follows_the_refusal(capsys: Captured) -> None:
    def respond(method: str, path: str, body: bytes, length: int | None) -> ApiAnswer:
        if path.endswith("index"):
            return written([{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "no\nfile"}])
        return ApiAnswer(400, None, b'{"error":"failed to load \'m\'"}')

    with served(respond) as url:
        _, _, err = run(capsys, "models", "load", "m", "--url", url)
    assert err.splitlines()[1] == "remora models load: no file"


# -- headers ----------------------------------------------------------------------------------------------------------


COMMANDS: dict[str, tuple[str, ...]] = {
    "infer": ("m", "--random"),
    "models list": (),
    "models index": (),
    "models load": ("m",),
    "models unload": ("m",),
    "explain": ("m",),
    "startup": (),
    "bench load": ("m", "--random"),
    "replay": ("requests.jsonl",),
    "release start": ("m", "2"),
    "release weight": ("m", "0.5"),
    "release promote": ("m",),
    "release rollback": ("m",),
    "release alias": ("m", "a", "1"),
    "release shadow": ("m", "2"),
    "release end": ("m",),
    "release status": ("m",),
}
COMMANDS = {name: words for name, words in COMMANDS.items() if is_present(ROWS[name.split()[0]].target)}
"""The commands that ask a server, with the arguments that they need; the server may be installed without its tools."""


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_every_command_with_the_url_of_a_server_takes_headers_and_profiles() -> None:
    asking = {words for words, parser in command_parsers() if {"--url", "--against"} & flags_of(parser)}
    assert asking == COMMANDS.keys()
    for words, parser in command_parsers():
        assert words not in asking or flags_of(parser) >= {"--header", "--profile", "--timeout"}, words


@pytest.fixture
def words_of(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a command that asks a server, with its arguments."""
    tensor = CapturedTensor("x", "FP32", (1,), bytes(4))
    (tmp_path / "requests.jsonl").write_bytes(
        line_of(Exchange("m", "1", "2026-01-02T03:04:05.678+00:00", "1", {}, [tensor], [], [[tensor]], "", 1))
    )
    return lambda name: [*name.split(), *(str(tmp_path / w) if w.endswith(".jsonl") else w for w in COMMANDS[name])]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_asks_a_server_sends_the_headers_that_it_was_given(
    name: str,
    words_of: Callable[[str], list[str]],
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = tmp_path / "key"
    key.write_text("out of a file\n")
    monkeypatch.setenv("REMORA_HEADERS", "x-tenant=one\nx-key=of the environment\n")
    monkeypatch.setenv("REMORA_API_KEY", "secret")
    seen: list[dict[str, str]] = []
    with served(always(403, b"no"), seen) as url:
        flag = "--against" if name == "replay" else "--url"
        run(capsys, *words_of(name), flag, url, "--header", f"X-Key=@{key}", "--header", "x-more=a=b")
    assert seen
    for headers in seen:
        assert {each: headers[each] for each in ("x-key", "x-tenant", "x-more", "x-api-key")} == {
            "x-key": "out of a file",
            "x-tenant": "one",
            "x-more": "a=b",
            "x-api-key": "secret",
        }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_asks_a_server_finds_it_and_its_key_by_a_profile(
    name: str,
    words_of: Callable[[str], list[str]],
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setenv("REMORA_PROFILES", str(tmp_path / "profiles.toml"))
    monkeypatch.setenv("REMORA_API_KEY", "of another server")
    (tmp_path / "key").write_text("of the profile\n")
    with served(always(403, b"no"), seen) as url:
        (tmp_path / "profiles.toml").write_text(f'[far]\nurl = "{url}"\napi_key = "@key"\n')
        run(capsys, *words_of(name), "--profile", "far")
    assert {headers.get("x-api-key") for headers in seen} == {"of the profile"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_a_server_refuses_names_the_ways_to_log_in(
    name: str, words_of: Callable[[str], list[str]], capsys: Captured
) -> None:
    with served(always(403, b"no")) as url:
        code, _, err = run(capsys, *words_of(name), "--against" if name == "replay" else "--url", url)
    assert code == 1
    assert "REMORA_API_KEY" in err.splitlines()[1]
    assert "--header NAME=VALUE" in err.splitlines()[1]


@pytest.mark.parametrize("word", ["no-equals", "=value", "na me=1", "x-key=secret\x00"])
def test_a_header_that_cannot_be_sent_is_wrong_usage_and_its_value_is_not_repeated(word: str, capsys: Captured) -> None:
    code, _, err = run(capsys, "models", "list", "--header", word)
    assert (code, err.count("\n")) == (2, 1)
    assert "secret" not in err


def test_a_header_goes_to_the_server_whose_start_is_measured() -> None:
    options = argparse.Namespace(header=["x-key=1"], header_variable="X-Key=0\nx-other=2", api_key_variable="")
    assert request_headers(options) == {"x-key": "1", "x-other": "2"}


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        ([], {"x-api-key": "k"}),
        (["x-other=1"], {"x-api-key": "k", "x-other": "1"}),
        (["X-API-Key=other"], {"x-api-key": "other"}),
        (["Authorization=Bearer other"], {"authorization": "Bearer other"}),
    ],
)
def test_the_key_in_the_environment_is_sent_unless_a_header_replaces_it(header: list[str], sent: object) -> None:
    options = argparse.Namespace(header=header, header_variable="", api_key_variable="k")
    assert request_headers(options) == sent


# -- servers that are not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("models", "list"), ("models", "load", "m"), ("infer", "m", "--random")])
def test_a_missing_server_is_reported_with_advice(command: tuple[str, ...], capsys: Captured) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    code, out, err = run(capsys, *command, "--url", gone)
    assert (code, out) == (1, "")
    assert f"cannot connect to {gone}: Connection refused" in err
    assert "remora serve PATH" in err
    assert err.count("\n") == 1


def test_a_server_that_is_too_slow_is_given_up(capsys: Captured) -> None:
    silence = threading.Event()

    def stay_silent(method: str, path: str, body: bytes, length: int | None) -> ApiAnswer:
        silence.wait(30)
        return written([])

    with served(stay_silent) as url:
        code, _, err = run(capsys, "models", "list", "--url", url, "--timeout", "0.05")
        silence.set()
    assert code == 1
    assert f"no answer from {url} within 0.05 s; raise --timeout" in err


@pytest.mark.parametrize(
    ("respond", "said"),
    [
        (always(200, b"<html>"), "with JSON: is it a V2 server?"),
        (always(200, b"{}"), "with an index: is it a V2 server?"),
        (always(200, b'["a"]'), "with an index: is it a V2 server?"),
        (always(200, b""), "with an index: is it a V2 server?"),
        (always(404, b"not\nhere"), "answered 404: not here"),
        (always(500, b""), "answered 500: no reason given"),
        (always(400, b'{"error":"no\\nway"}'), "answered 400: no way"),
        (always(400, b"[1]"), "answered 400: [1]"),
    ],
)
def test_an_index_of_another_kind_is_reported(respond: Respond, said: str, capsys: Captured) -> None:
    with served(respond) as url:
        code, out, err = run(capsys, "models", "list", "--url", url)
    assert (code, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1


def test_an_empty_index_and_a_model_without_a_row_are_not_failures(capsys: Captured) -> None:
    with served(lambda method, path, body, length: written([] if path.endswith("index") else None)) as url:
        assert run(capsys, "models", "list", "--url", url)[1] == f"{url} has no models\n"
        assert run(capsys, "models", "load", "m", "--url", url)[1] == "m: loaded\n"


def test_a_model_that_was_never_loaded_has_dashes(capsys: Captured) -> None:
    with served(
        always(200, b'[{"name":"m"},{"name":"n","version":"1","state":"UNAVAILABLE","reason":"a\\nb"}]')
    ) as url:
        _, out, _ = run(capsys, "models", "list", "--url", url)
    assert [line.split() for line in out.splitlines()[1:]] == [["m", "-", "-"], ["n", "1", "UNAVAILABLE", "a", "b"]]


def test_an_inference_answer_that_makes_no_sense_is_reported(capsys: Captured) -> None:
    def respond(method: str, path: str, body: bytes, length: int | None) -> ApiAnswer:
        return written(METADATA) if method == "GET" else ApiAnswer(200, 2, b"{}xyz")

    with served(respond) as url:
        code, out, err = run(capsys, "infer", "m", "--url", url, "--random")
    assert (code, out) == (1, "")
    assert "the server's answer cannot be read" in err


def test_an_answer_in_json_is_read_too(capsys: Captured) -> None:
    def respond(method: str, path: str, body: bytes, length: int | None) -> ApiAnswer:
        outputs = [{"name": "y", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}]
        return written(METADATA if method == "GET" else {"model_name": "m", "outputs": outputs, "parameters": {"p": 1}})

    with served(respond) as url:
        code, out, _ = run(capsys, "infer", "m", "--url", url, "--random")
    assert code == 0
    assert out.splitlines()[0].startswith("m: ")
    assert "p = 1" in out
    assert '["a", "b"]' in out


def test_a_prefix_of_the_url_goes_before_every_path(capsys: Captured) -> None:
    asked: list[tuple[str, str]] = []

    def respond(method: str, path: str, body: bytes, length: int | None) -> ApiAnswer:
        asked.append((method, path))
        return written([])

    with served(respond) as url:
        assert run(capsys, "models", "list", "--url", f"{url}/behind/proxy")[0] == 0
    assert asked == [("POST", "/behind/proxy/v2/repository/index")]


@pytest.mark.parametrize(
    "address",
    ["http://user:s3cret@127.0.0.1:9", "u:s3/cret@h", "http://h?key=s3cret", "http://h#s3cret", "http://h:s3"],
)
@pytest.mark.parametrize("words", ["models list", pytest.param("bench load --path=/x", marks=needs("remora_tools"))])
def test_a_url_with_secrets_is_refused_without_them(words: str, address: str, capsys: Captured) -> None:
    code, out, err = run(capsys, *words.split(), "--url", address)
    assert code == 2
    assert "--url: expected http://HOST:PORT without user and query" in err
    assert "s3" not in out + err


# -- doors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a?b", "a#b", "ä", "a\n"])
def test_a_name_that_no_path_can_hold_never_leaves(name: str) -> None:
    with pytest.raises(NotFoundError, match="invalid model name"):
        model_path(name)


def test_a_models_path_may_name_a_version() -> None:
    assert model_path("m") == "/v2/models/m"
    assert model_path("m", 3) == "/v2/models/m/versions/3"


class SilentEngine:
    """An engine with one model that takes every request and answers none."""

    traces, is_plain = UNTRACED, True

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.name, self.version_text, self.decoupled = "m", "1", False
        self.options = EngineOptions()

    def resolve(self, name: str, version: int) -> SilentEngine:
        return self

    submit_to = Engine.submit_to
    capture = None

    def submit(self, form: InferForm, data: object, reply: Any, **settings: object) -> Ticket:
        self.tickets.append(Ticket(Request(form, {}, (), 1, None), reply))
        return self.tickets[-1]


def test_a_request_that_the_engine_is_too_slow_for_is_cancelled() -> None:
    engine: Any = SilentEngine()
    with pytest.raises(UnavailableError, match=r"no answer within 0\.01 s"):
        EngineClient(engine, 0.01).exchange("POST", "/v2/models/m/infer", b'{"inputs":[]}')
    assert [ticket.request.cancelled for ticket in engine.tickets] == [True]


def test_the_port_of_grpc_is_named_without_its_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65_536)
                peer.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x80")

        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(UnavailableError) as refused:
            HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", 5).exchange("GET", "/v2")
        server.join()
    assert "is a port for gRPC: pass the one for HTTP, usually 8000" in str(refused.value)
    assert str(refused.value).isprintable()


def test_text_of_the_peer_is_escaped_and_an_unknown_model_has_a_hint() -> None:
    class Client:
        name = "it"

        def exchange(self, *_arguments: object) -> ApiAnswer:
            return ApiAnswer(200, None, b'[{"name": "digits"}]')

    with pytest.raises(RemoraError) as refused:
        raise_for_status(Client(), ApiAnswer(500, None, b"\x1b[2J\x07 bad"))  # type: ignore[arg-type]
    assert str(refused.value) == r"it answered 500: \x1b[2J\x07 bad"
    text = b'{"error": "Request for unknown model: \'digtis\' is not found"}'
    with pytest.raises(RemoraError, match=r"is not found; did you mean 'digits'\?"):
        raise_for_status(Client(), ApiAnswer(404, None, text))  # type: ignore[arg-type]
