"""Which requests of web pages are refused, as a table."""

from __future__ import annotations

import pytest

from remora.protocols.cross_site import SharedOrigins, host_names, refuse_host, refuse_page

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


def test_a_page_without_an_origin_is_not_this_servers_even_if_the_request_names_no_host() -> None:
    for origin in (b"null", b"", b"file://"):
        assert refuse_page("POST", {b"origin": origin, b"content-type": b"application/json"}.get, ALLOWED)


PAGE = b"https://App.example"


@pytest.mark.parametrize("origin", [b"https://app.example", b"https://APP.example"])
def test_a_named_origin_may_read_and_caches_keep_it_apart(origin: bytes) -> None:
    shared = SharedOrigins((PAGE.decode(),))
    headers = dict(shared.headers({b"origin": origin}.get))
    assert headers[b"Access-Control-Allow-Origin"] == origin
    assert headers[b"Vary"] == b"Origin"
    assert b"Access-Control-Allow-Credentials" not in headers


@pytest.mark.parametrize(
    ("named", "sent", "shared"),
    [
        ("https://app.example:443", b"https://app.example", True),
        ("HTTPS://App.Example:443", b"https://app.example", True),
        ("http://app.example:80", b"http://app.example", True),
        ("http://[::1]:80", b"http://[::1]", True),
        ("http://app.example:443", b"http://app.example:443", True),
        ("https://app.example:80", b"https://app.example:80", True),
        ("http://app.example:443", b"http://app.example", False),
        ("https://app.example:80", b"https://app.example", False),
        ("https://app.example:8443", b"https://app.example", False),
    ],
)
def test_the_default_port_of_a_named_origin_is_left_out_as_browsers_do(named: str, sent: bytes, shared: bool) -> None:
    assert bool(SharedOrigins((named,)).headers({b"origin": sent}.get)) == shared


@pytest.mark.parametrize("origin", [None, b"null", b"http://app.example", b"https://app.example.evil", b"https://a"])
def test_another_origin_gets_no_headers_that_share(origin: bytes | None) -> None:
    assert SharedOrigins((PAGE.decode(),)).headers(({} if origin is None else {b"origin": origin}).get) == ()


def test_every_origin_is_shared_with_by_one_value_for_all() -> None:
    headers = dict(SharedOrigins(("*", PAGE.decode())).headers({b"origin": b"null"}.get))
    assert headers.keys() == {b"Access-Control-Allow-Origin", b"Access-Control-Expose-Headers"}
    assert headers[b"Access-Control-Allow-Origin"] == b"*"


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://*.example", "null", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"--cors-origin=.*expected an origin"):
        SharedOrigins((origin,))


def test_a_preflight_repeats_the_names_of_headers_alone() -> None:
    shared = SharedOrigins((PAGE.decode(),))
    asked = {b"access-control-request-method": b"POST", b"access-control-request-headers": b"x-api-key, a\rb, ,y"}
    assert dict(shared.preflight("OPTIONS", asked.get))[b"Access-Control-Allow-Headers"] == b"x-api-key, y"
    assert shared.preflight("POST", asked.get) == ()
    assert shared.preflight("OPTIONS", {}.get) == ()
