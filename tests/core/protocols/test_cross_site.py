"""Which requests of web pages are refused, as a table."""

from __future__ import annotations

import pytest

from remora.protocols.cross_site import host_names, refuse_host, refuse_page

ALLOWED = host_names(("Models.Example",))


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b"localhost",
        b"LOCALHOST:8000",
        b"localhost.:8000",
        b"a.localhost:1",
        b"127.0.0.1",
        b"127.0.0.1:8000",
        b"127.8.9.10:8000",
        b"[::1]:8000",
        b"[::1]",
        b"::1",
        b"models.example",
        b"MODELS.example:8000",
    ],
)
def test_a_loopback_address_answers_for_names_of_this_machine_and_allowed_ones(host: bytes) -> None:
    assert refuse_host({b"host": host, b"origin": b"http://" + host}.get, ALLOWED) == ""


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"evil.example:8000",
        b"localhost.evil.example",
        b"127.0.0.1.evil.example:8000",
        b"evillocalhost.example",
        b"[::2]:8000",
        b"0.0.0.0:8000",
        b"192.168.0.1",
        b"sub.models.example",
        b"models.example.evil",
        b"localhost:8000:evil",
    ],
)
def test_a_loopback_address_refuses_other_names_and_names_the_flag(host: bytes) -> None:
    assert "--allowed-host" in refuse_host({b"host": host}.get, ALLOWED)


@pytest.mark.parametrize(
    "host", [b"localhost:8000, evil.example", b'"><script>evil()</script>', b"a b", b"\xe9.example"]
)
def test_a_host_that_is_not_a_name_is_refused_and_not_repeated(host: bytes) -> None:
    reason = refuse_host({b"host": host}.get, ALLOWED)
    assert "not the name of a host" in reason
    assert host.decode("latin-1") not in reason


def test_a_name_without_a_dot_is_known_unless_a_page_names_it() -> None:
    assert refuse_host({b"host": b"upstream:8000"}.get, ALLOWED) == ""
    for name in (b"origin", b"sec-fetch-site"):
        assert "'upstream'" in refuse_host({b"host": b"upstream:8000", name: b"same-origin"}.get, ALLOWED)


def refusal(method: str = "POST", **headers: str) -> str:
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return refuse_page(method, given.get, ALLOWED)


def test_programs_pass_whatever_the_type_of_their_body() -> None:
    assert not refusal(host="localhost:8000")
    assert not refusal(host="localhost:8000", content_type="application/x-www-form-urlencoded")


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH"])
@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "what-comes-next"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site", "content_type": "application/json"},
        {"origin": "http://localhost:8000", "sec_fetch_site": "same-site"},
    ],
)
def test_a_page_of_another_site_is_refused(method: str, headers: dict[str, str]) -> None:
    assert "another site" in refusal(method, host="localhost:8000", **headers)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_what_changes_nothing_passes(method: str) -> None:
    assert not refusal(method, host="localhost:8000", origin="https://evil.example", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:8000"},
        {"origin": "http://LOCALHOST:8000", "content_type": "application/json"},
        {"sec_fetch_site": "none"},
        {"origin": "https://behind.example", "sec_fetch_site": "same-origin"},
        {"origin": "https://models.example:8443", "sec_fetch_site": "cross-site"},
    ],
)
def test_a_page_of_this_server_or_of_an_allowed_host_passes(headers: dict[str, str]) -> None:
    assert not refusal(host="localhost:8000", **headers)


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "Text/Plain; charset=UTF-8", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"],
)
def test_a_page_must_send_what_needs_a_preflight(kind: str) -> None:
    refused = refusal(host="localhost:8000", origin="http://localhost:8000", content_type=kind)
    assert "application/json" in refused


@pytest.mark.parametrize("name", ["", "https://a.example", "a b", "a/b", "*"])
def test_an_allowed_host_is_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="--allowed-host="):
        host_names((name,))
