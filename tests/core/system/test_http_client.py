"""Tests of ``remora.system.http_client`` against servers of the standard library on ports of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports
from remora.system.http_client import (
    AnswerTooLongError,
    Connection,
    Limits,
    NoAnswerError,
    NoAnswerInTimeError,
    NotHttpError,
    fetch,
)

PATIENT = Limits(60.0)
SECRET = {"Authorization": "Bearer s3cret", "X-Api-Key": "s3cret", "Accept": "text/plain"}


class Server(ThreadingHTTPServer):
    """Server that records requests and answers all of them alike.

    ``places`` has the target of the redirect of a path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.status, self.content = 200, b"fine"
        self.places: dict[str, str] = {}
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.peers: set[int] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Requests(BaseHTTPRequestHandler):
    """Requests to `Server`."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.got.append((f"{self.command} {self.path}", {**self.headers}, body))
        self.server.peers.add(self.client_address[1])
        place = self.server.places.get(self.path)
        self.send_response(302 if place else self.server.status)
        if place:
            self.send_header("Location", place)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    do_POST = do_GET  # noqa: N815 - the class's name


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as made:
        yield made


@contextmanager
def answering(*pieces: bytes) -> Iterator[int]:
    """Yield the port of a server that answers one connection with these bytes and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                for piece in pieces:
                    connection.sendall(piece)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_any_status_is_an_answer(server: Server) -> None:
    for status in (200, 404, 503):
        server.status = status
        answer = fetch(f"{server.url}/x?y=1", PATIENT, body=b"{}", headers={"Content-Type": "application/json"})
        assert (answer.status, answer.body, answer.is_success) == (status, b"fine", status == 200)
        assert answer.headers["content-length"] == "4"
    line, headers, body = server.got[0]
    assert (line, headers["Content-Type"], body) == ("POST /x?y=1", "application/json", b"{}")
    assert headers["User-Agent"].startswith("remora/")


def test_the_user_of_a_url_is_sent_as_basic_authorization(server: Server) -> None:
    fetch(server.url.replace("://", "://user:p%40ss@"), PATIENT)
    assert server.got[0][1]["Authorization"] == "Basic dXNlcjpwQHNz"


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://h/x", "data:,x", "x", "http://", "http://h:s3cret@h:port", "http://[", "http://h:0"],
)
def test_only_urls_of_http_are_opened(url: str) -> None:
    with pytest.raises(NoAnswerError, match="expected a URL with http") as caught:
        fetch(url, PATIENT)
    assert "s3cret" not in str(caught.value)


def test_a_redirect_is_the_answer_unless_it_may_be_followed(server: Server) -> None:
    server.places["/a"] = f"{server.url}/b"
    assert fetch(f"{server.url}/a", PATIENT).status == 302
    assert fetch(f"{server.url}/a", PATIENT, redirects=True).status == 200
    assert fetch(f"{server.url}/a", PATIENT, body=b"x", redirects=True).status == 302
    assert [line for line, _, _ in server.got] == ["GET /a", "GET /a", "GET /b", "POST /a"]


def test_secrets_follow_a_redirect_to_the_same_server_only(server: Server) -> None:
    with running() as other:
        server.places |= {"/a": f"{server.url}/b", "/away": f"{other.url}/b"}
        fetch(f"{server.url}/a", PATIENT, headers=SECRET, redirects=True)
        assert server.got[-1][1]["Authorization"] == "Bearer s3cret"
        fetch(f"{server.url}/away", PATIENT, headers=SECRET, redirects=True)
        assert other.got[-1][1]["Accept"] == "text/plain"
        assert "s3cret" not in str(other.got)


@pytest.mark.parametrize("place", ["file:///etc/passwd", "http://user:s3cret@127.0.0.1/", "ftp://127.0.0.1/"])
def test_a_redirect_to_anything_but_a_plain_url_of_http_is_not_followed(server: Server, place: str) -> None:
    server.places["/a"] = place
    assert fetch(f"{server.url}/a", PATIENT, redirects=True).status == 302


def test_a_longer_answer_than_the_limit_is_refused_and_an_error_is_cut(server: Server) -> None:
    server.content = b"x" * 200_000
    assert len(fetch(server.url, Limits(60.0, 200_000)).body) == 200_000
    with pytest.raises(AnswerTooLongError, match="longer than 199999 bytes"):
        fetch(server.url, Limits(60.0, 199_999))
    server.status = 500
    assert len(fetch(server.url, Limits(60.0, 100)).body) == 100


def test_the_whole_answer_has_a_limit_in_time(server: Server) -> None:
    with pytest.raises(NoAnswerInTimeError, match="takes longer than 0 s"):
        fetch(server.url, Limits(60.0, whole_s=0.0))


def test_a_silent_server_is_a_timeout() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(NoAnswerInTimeError, match=r"timed out after 0\.1 s"),
    ):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}", Limits(0.1))


def test_errors_are_plain_and_have_no_secrets() -> None:
    (port,) = free_ports(1)
    with pytest.raises(NoAnswerError) as caught:
        fetch(f"http://user:s3cret@127.0.0.1:{port}/?token=s3cret", PATIENT)
    assert str(caught.value) == "Connection refused"
    assert caught.value.__cause__ is None
    with pytest.raises(NoAnswerError) as caught:
        fetch("http://127.0.0.1:1/a b?token=s3cret", PATIENT)
    assert "s3cret" not in str(caught.value)


def test_requests_go_through_the_proxy_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    assert fetch("http://models.example/x", PATIENT).body == b"fine"
    assert server.got[0][0] == "GET http://models.example/x"


@pytest.mark.parametrize("content", [b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", b"SSH-2.0\r\n"])
def test_what_is_not_http_is_told_from_no_connection(content: bytes) -> None:
    with answering(content) as port, pytest.raises(NotHttpError, match="is not HTTP/1"):
        fetch(f"http://127.0.0.1:{port}", PATIENT)


def test_a_truncated_answer_is_not_an_answer() -> None:
    truncated = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"
    with answering(truncated) as port, pytest.raises(NoAnswerError, match="before the end"):
        fetch(f"http://127.0.0.1:{port}", PATIENT)


def test_a_connection_carries_several_requests(server: Server) -> None:
    with closing(Connection("127.0.0.1", server.server_port, 60.0)) as connection:
        for path in ("/a", "/b"):
            connection.connect()
            connection.send("GET", path, headers={"X-Name": b"value"})
            incoming = connection.receive()
            assert (incoming.status, incoming.headers["content-length"]) == (200, "4")
            assert b"".join(incoming.pieces()) == b"fine"
        connection.send("POST", "/c", b"body")
        assert connection.receive().read() == b"fine"
    assert [line for line, _, _ in server.got] == ["GET /a", "GET /b", "POST /c"]
    assert len(server.peers) == 1


def test_a_connection_is_opened_again_after_a_failure(server: Server) -> None:
    (port,) = free_ports(1)
    connection = Connection("127.0.0.1", port, 60.0)
    with pytest.raises(NoAnswerError, match="Connection refused"):
        connection.connect()
    connection.close()
    connection = Connection("127.0.0.1", server.server_port, 60.0)
    with pytest.raises(NoAnswerError):
        connection.send("GET", "/a b")
    connection.send("GET", "/c")
    assert connection.receive().read() == b"fine"
    connection.close()


def test_a_stream_that_breaks_yields_what_arrived_before_it_fails() -> None:
    broken = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"
    with answering(broken) as port, closing(Connection("127.0.0.1", port, 60.0)) as connection:
        connection.send("GET", "/")
        pieces = connection.receive().pieces()
        assert next(pieces) == b"ab"
        with pytest.raises(NoAnswerError):
            next(pieces)


def test_a_server_without_a_trusted_certificate_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(NoAnswerError, match="SSL"):
        fetch(server.url.replace("http:", "https:"), PATIENT)
