"""HTTP/1.1 heads and chunked bodies: tables whole and damaged, smuggling attempts, and any bytes at all."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http1 import (
    LAST_CHUNK,
    BadRequest,
    ChunkDecoder,
    Head,
    HeadNote,
    HeadParser,
    chunk,
    response_head,
    stream_head,
    too_large,
)

LIMIT = 1000


JSON_HEAD = Head("POST", "/v2/models/m/infer", ())
BINARY_HEAD = Head("POST", "/v2/models/m/infer", ((b"Inference-Header-Content-Length", b"9"),))


def itself(head: Head) -> Head:
    return head


def head_of(*lines: str) -> Head:
    return HeadParser(itself).parse(block_of(*lines))


def block_of(*lines: str) -> bytes:
    """A head of these lines, and with a host where HTTP/1.1 asks for one."""
    first, *rest = lines
    if first.endswith("HTTP/1.1") and not any(line.lower().startswith("host:") for line in rest):
        rest.append("Host: h")
    return "\r\n".join((first, *rest, "", "")).encode("latin-1")


# -- heads ----------------------------------------------------------------------------------------------------------


def test_a_head_is_taken_apart() -> None:
    head = head_of("POST /v2/models/m%20x/infer?a=b?c HTTP/1.1", "Host: h", "Content-Length: 12", "X-Y:  z ")
    assert (head.method, head.path, head.query) == ("POST", "/v2/models/m%20x/infer", "a=b?c")
    assert head.content_length == 12
    assert not head.chunked
    assert head.get(b"x-y") == b"z"
    assert head.get(b"absent") is None
    assert head.headers[0] == (b"Host", b"h")


def test_header_names_are_found_in_any_case_and_the_first_one_counts() -> None:
    head = head_of("GET / HTTP/1.1", "ACCEPT: a", "accept: b")
    assert head.get(b"accept") == b"a"


@pytest.mark.parametrize("value", ["chunked", "Chunked", "chunked ", "  chunked  "])
def test_a_chunked_head_says_so_in_any_case_and_whatever_space_is_around(value: str) -> None:
    head = head_of("POST / HTTP/1.1", f"Transfer-Encoding: {value}")
    assert head.chunked
    assert head.get(b"transfer-encoding") == value.strip().encode()


@pytest.mark.parametrize(("value", "expected"), [("100-continue", True), ("100-Continue", True), ("other", False)])
def test_an_expectation_is_seen(value: str, expected: bool) -> None:
    assert head_of("POST / HTTP/1.1", f"Expect: {value}", "Content-Length: 1").expects_continue is expected


@pytest.mark.parametrize(
    ("line", "connection", "expected"),
    [
        ("GET / HTTP/1.1", None, True),
        ("GET / HTTP/1.1", "close", False),
        ("GET / HTTP/1.1", "Close", False),
        ("GET / HTTP/1.1", "TE, close", False),
        ("GET / HTTP/1.1", "closed", True),
        ("GET / HTTP/1.1", "keep-alive", True),
        ("GET / HTTP/1.0", None, False),
        ("GET / HTTP/1.0", "Keep-Alive", True),
        ("GET / HTTP/1.0", "close", False),
        ("GET / HTTP/1.0", "keep-alive, close", False),
    ],
)
@pytest.mark.parametrize("length", [None, 5])
def test_the_connection_is_kept_as_version_and_header_say(
    line: str, connection: str | None, expected: bool, length: int | None
) -> None:
    lines = [line]
    if connection is not None:
        lines.append(f"Connection: {connection}")
    if length is not None:
        lines.append(f"Content-Length: {length}")
    assert head_of(*lines).keep_alive is expected


def test_two_connection_headers_count_together() -> None:
    assert not head_of("GET / HTTP/1.1", "Connection: TE", "Connection: close").keep_alive


def test_an_offered_upgrade_is_not_taken() -> None:
    head = head_of("POST /x HTTP/1.1", "Connection: Upgrade", "Upgrade: h2c", "Content-Length: 4")
    assert (head.method, head.path, head.content_length, head.keep_alive) == ("POST", "/x", 4, True)


def test_empty_lines_before_a_request_are_skipped() -> None:
    assert HeadParser(itself).parse(b"\r\n\r\n" + block_of("GET /x HTTP/1.1")).path == "/x"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        pytest.param(("GET",), 400, id="no-target"),
        pytest.param(("GET /",), 400, id="no-version"),
        pytest.param(("GET / x HTTP/1.1",), 400, id="two-targets"),
        pytest.param(("GET  HTTP/1.1",), 400, id="empty-target"),
        pytest.param(("get / HTTP/1.1",), 400, id="lower-case-method"),
        pytest.param(("HTTP/1.1 200 OK",), 400, id="a-response"),
        pytest.param(("SETUP / RTSP/1.0",), 400, id="rtsp"),
        pytest.param(("GET / HTTP/0.9",), 505, id="version-0.9"),
        pytest.param(("GET / HTTP/1.2",), 505, id="version-1.2"),
        pytest.param(("GET / HTTP/2.0",), 505, id="version-2"),
        pytest.param(("PRI * HTTP/2.0",), 505, id="http-2-preface"),
        pytest.param(("GET /\xe9 HTTP/1.1",), 400, id="target-beyond-ascii"),
        pytest.param(("GET / HTTP/1.1", "abc"), 400, id="header-without-colon"),
        pytest.param(("GET / HTTP/1.1", ": b"), 400, id="header-without-name"),
        pytest.param(("GET / HTTP/1.1", "a b: c"), 400, id="space-in-name"),
        pytest.param(("GET / HTTP/1.1", "a\x00: c"), 400, id="nul-in-name"),
        pytest.param(("GET / HTTP/1.1", "a: c\x00"), 400, id="nul-in-value"),
        pytest.param(("GET / HTTP/1.1", "a: b\rc: d"), 400, id="bare-cr"),
        pytest.param(("GET / HTTP/1.1", "a: b\nc: d"), 400, id="bare-lf"),
        pytest.param(("GET /a HTTP/1.1\n\nGET /b HTTP/1.1",), 400, id="a-second-request-behind-bare-lf"),
        pytest.param(("GET /a HTTP/1.1", "a: b\n\nGET /c HTTP/1.1"), 400, id="a-second-request-in-a-header"),
        pytest.param(("GET / HTTP/1.1", "a: b", " c"), 400, id="obs-fold"),
        pytest.param(("GET / HTTP/1.1", " a: b"), 400, id="obs-fold-at-once"),
        pytest.param(("POST / HTTP/1.1", "X: a", " Content-Length: 5"), 400, id="obs-fold-hides-length"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: 3", "Content-Length: 3"), 400, id="two-lengths"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: 3", "content-length: 4"), 400, id="two-other-lengths"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: 3, 3"), 400, id="length-list"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: "), 400, id="length-empty"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: -1"), 400, id="length-negative"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: +1"), 400, id="length-plus"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: 0x1"), 400, id="length-hex"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: 1_0"), 400, id="length-underscore"),
        pytest.param(("POST / HTTP/1.1", f"Content-Length: {10**30}"), 400, id="length-overflow"),
        pytest.param(("POST / HTTP/1.1", "Content-Length : 3"), 400, id="space-before-colon"),
        pytest.param(("POST / HTTP/1.1", "Content-Length: 3", "Transfer-Encoding: chunked"), 400, id="cl-and-te"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding: chunked", "Content-Length: 3"), 400, id="te-and-cl"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"), 400, id="te-te"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding: identity", "Transfer-Encoding: chunked"), 501, id="te-2"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding: chunked, chunked"), 400, id="te-twice"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding: gzip, chunked"), 501, id="te-gzip"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding: xchunked"), 400, id="te-xchunked"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding: "), 400, id="te-empty"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding:\x0bchunked"), 400, id="te-vertical-tab"),
        pytest.param(("POST / HTTP/1.1", "Transfer-Encoding : chunked"), 400, id="te-space-before-colon"),
        pytest.param(("POST / HTTP/1.0", "Transfer-Encoding: chunked"), 400, id="te-in-1.0"),
        pytest.param(("",), 400, id="nothing"),
    ],
)
def test_a_head_that_two_readers_could_read_differently_is_refused(lines: tuple[str, ...], status: int) -> None:
    with pytest.raises(BadRequest) as refused:
        head_of(*lines)
    assert refused.value.status == status


@pytest.mark.parametrize("line", ["FOO /a?b HTTP/1.1", "GETX /a?b HTTP/1.1", "F /a?b HTTP/1.0"])
def test_an_unknown_method_is_refused_by_the_route(line: str) -> None:
    head = head_of(line, "FOO: GETX", "Content-Length: 3")
    assert (head.method, head.path, head.query) == (line.split(" ")[0], "/a", "b")
    assert (head.headers[0], head.content_length) == ((b"FOO", b"GETX"), 3)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://host:8000/v2/models?x=/y", "/v2/models", "x=/y"),
        ("HTTPS://host", "/", ""),
        ("http://host?x", "/", "x"),
        ("*", "*", ""),
        ("/http://host/v2", "/http://host/v2", ""),
    ],
)
def test_a_target_may_name_the_host_as_for_a_proxy(target: str, path: str, query: str) -> None:
    head = head_of(f"OPTIONS {target} HTTP/1.1")
    assert (head.path, head.query) == (path, query)


def test_the_same_bytes_give_the_same_head() -> None:
    parser = HeadParser(itself)
    block = block_of("GET /x HTTP/1.1", "a: b")
    head = parser.parse(block)
    assert parser.parse(bytes(bytearray(block))) is head
    assert parser.parse(block_of("GET /x HTTP/1.1", "a: c")) is not head


def test_a_head_has_a_note_of_each_service_and_few_of_them() -> None:
    head = head_of("GET /x HTTP/1.1")
    notes = [HeadNote[int]() for _ in range(20)]
    for number, note in enumerate(notes):
        assert note.get(head) is None
        assert note.put(head, number) == note.get(head) == number
    assert head.notes is not None
    assert len(head.notes) <= 4


def test_the_memo_stays_small_whatever_comes() -> None:
    parser = HeadParser(itself)
    for index in range(2000):
        parser.parse(block_of(f"GET /{index} HTTP/1.1"))
    assert len(parser._memo) <= 512
    long = block_of("GET / HTTP/1.1", f"a: {'x' * 4096}")
    assert parser.parse(long) is not parser.parse(long)


words = b"GET|POST|CONNECT| |/|/v2|?|%| HTTP/1.1| HTTP/1.0|:|,|\t|3|Content-Length|Transfer-Encoding|chunked".split(
    b"|"
)
lines = b"Connection|close|upgrade|Upgrade|Expect: 100-continue|Host: h|\r\n|\r|\n|\x00|\xff".split(b"|")
tokens = st.sampled_from([*words, *lines])


@given(st.one_of(st.binary(max_size=200), st.lists(tokens, max_size=25).map(b"".join)))
def test_any_bytes_are_a_head_or_a_bad_request(data: bytes) -> None:
    try:
        head = HeadParser(itself).parse(data + b"\r\n\r\n")
    except BadRequest:
        return
    assert head.content_length >= 0
    assert not (head.chunked and head.content_length)
    names = [name.lower() for name, _ in head.headers]
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1


def parsed(parser: HeadParser[Head], block: bytes) -> tuple[object, ...]:
    try:
        head = parser.parse(block)
    except BadRequest as error:
        return error.status, error.text
    facts = head.content_length, head.chunked, head.expects_continue, head.keep_alive, head.http10
    return head.method, head.path, head.query, head.headers, *facts


BLOCKS = st.one_of(
    st.lists(tokens, max_size=8).map(lambda parts: b"GET / HTTP/1.1\r\nHost: h\r\n" + b"".join(parts) + b"\r\n\r\n"),
    st.sampled_from(
        [
            block_of(f"{method} /{target} HTTP/{version}", *lines)
            for method, target, version in (("GET", "x", "1.1"), ("POST", "x?a=b", "1.1"), ("GET", "x", "1.0"))
            for lines in (("Host: h",), ("Host: h", "Content-Length: 3"), ("Host: h", "a: b"), ("a: b", "Host: h"))
        ]
    ),
)


@given(st.lists(BLOCKS, max_size=12))
def test_a_cached_head_equals_a_fresh_one(blocks: list[bytes]) -> None:
    parser = HeadParser(itself)
    for block in blocks * 2:
        assert parsed(parser, block) == parsed(HeadParser(itself), block)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (b"", "has no Host header"),
        (b"Accept: a\r\n", "has no Host header"),
        (b"Host: a\r\nHost: a\r\n", "several Host headers"),
        (b"Host: a\r\nX: y\r\nhost: b\r\n", "several Host headers"),
    ],
)
def test_a_request_names_one_host(lines: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        HeadParser(itself).parse(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")
    assert refused.value.status == 400


def test_http_1_0_need_not_name_a_host() -> None:
    assert head_of("GET / HTTP/1.0").get(b"host") is None
    assert head_of("GET / HTTP/1.1", "Host: ").get(b"host") == b""
    with pytest.raises(BadRequest, match="several Host headers"):
        head_of("GET / HTTP/1.0", "Host: a", "Host: b")


# -- chunked bodies -------------------------------------------------------------------------------------------------


def chunked(*parts: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return body + b"0\r\n" + trailer + b"\r\n"


def decoded(data: bytes, limit: int = LIMIT, step: int = 10**6) -> tuple[bytes, int, bool]:
    """(body, bytes taken, done) of ``data`` fed in pieces of ``step``."""
    decoder, taken = ChunkDecoder(limit, JSON_HEAD), 0
    while taken < len(data) and not decoder.done:
        taken += decoder.feed(data[taken : taken + step])
    return bytes(decoder.body), taken, decoder.done


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (chunked(), b""),
        (chunked(b"abc"), b"abc"),
        (chunked(b"abc", b"defg"), b"abcdefg"),
        (chunked(b"\r\n0\r\n\r\n"), b"\r\n0\r\n\r\n"),
        (chunked(b"abc", extension=b';a="b"'), b"abc"),
        (chunked(b"abc", extension=b" ; a"), b"abc"),
        (chunked(b"abc", trailer=b"X: y\r\nZ: w\r\n"), b"abc"),
        (b"00A\r\n0123456789\r\n000\r\n\r\n", b"0123456789"),
        (b"a\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_a_chunked_body_is_put_together_however_it_comes(wire: bytes, body: bytes, step: int) -> None:
    assert decoded(wire, step=step) == (body, len(wire), True)


@pytest.mark.parametrize("cut", range(len(chunked(b"abc", b"de"))))
def test_a_body_cut_short_is_not_done(cut: int) -> None:
    assert not decoded(chunked(b"abc", b"de")[:cut])[2]


def test_bytes_after_the_body_are_left_for_the_next_request() -> None:
    wire = chunked(b"abc")
    assert decoded(wire + b"GET / HTTP/1.1") == (b"abc", len(wire), True)


@pytest.mark.parametrize(
    "wire",
    [
        chunked(b"a", extension=b";a\rb"),
        chunked(b"a", extension=b";a\0"),
        chunked(b"a", extension=b";a\x7f"),
        b"1\r\na\r\n0;a\rb\r\n\r\n",
        chunked(b"a", trailer=b"GET /v2 HTTP/1.1\r\n"),
        chunked(b"a", trailer=b"X : y\r\n"),
        chunked(b"a", trailer=b": y\r\n"),
        chunked(b"a", trailer=b"X: y\r\n z\r\n"),
        chunked(b"a", trailer=b"X: y\rz\r\n"),
        chunked(b"a", trailer=b"X: y\0\r\n"),
        b"\r\n",
        b"g\r\na\r\n0\r\n\r\n",
        *(sign + b"1\r\na\r\n0\r\n\r\n" for sign in (b"-", b"+", b"0x", b"0_", b" ", b"\xd9\xa1")),
        b"1\na\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1\r\na\n",
        b"1\r\na\r\r\n",
        b"3\r\nab\r\n0\r\n\r\n",
        b";x\r\n",
        b"00000000000000001\r\na\r\n0\r\n\r\n",
        b"0\r\n\n",
        b"1;" + b"x" * 10_000,
        b"0\r\n" + b"x" * 10_000,
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_an_invalid_chunked_body_is_refused(wire: bytes, step: int) -> None:
    with pytest.raises(BadRequest) as refused:
        decoded(wire + b"\r\n" * 10, step=step)
    assert refused.value.status == 400


def test_the_limit_is_the_last_size_allowed() -> None:
    assert decoded(chunked(b"x" * LIMIT))[2]
    with pytest.raises(BadRequest, match="exceeds the maximum allowed input size of 1000 bytes"):
        decoded(chunked(b"x" * (LIMIT + 1)))
    with pytest.raises(BadRequest, match="exceeds"):
        decoded(chunked(b"x" * LIMIT, b"y"))


def feed_all(decoder: ChunkDecoder, data: bytes) -> None:
    """Feed bytes in as many calls as they take, because one call does a bounded amount of work."""
    view = memoryview(data)
    while view:
        taken = decoder.feed(view)
        assert taken
        view = view[taken:]


def test_the_limit_is_enforced_before_memory_is_taken() -> None:
    decoder = ChunkDecoder(1 << 30, JSON_HEAD)
    tracemalloc.start()
    try:
        decoder.feed(b"3fffffff\r\n")
        assert tracemalloc.get_traced_memory()[1] < 100_000
        with pytest.raises(BadRequest):
            ChunkDecoder(1 << 30, JSON_HEAD).feed(b"ffffffffffffffff\r\n")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_many_small_chunks_cost_little_more_than_their_bytes() -> None:
    wire = b"2\r\nab\r\n" * 20_000
    decoder = ChunkDecoder(1 << 20, JSON_HEAD)
    tracemalloc.start()
    try:
        feed_all(decoder, wire)
        assert tracemalloc.get_traced_memory()[0] < 4 * 40_000
    finally:
        tracemalloc.stop()
    assert len(decoder.body) == 40_000


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=5), st.lists(st.integers(0, 200), max_size=6))
def test_any_split_of_a_valid_body_gives_the_same_body(parts: list[bytes], cuts: list[int]) -> None:
    wire = chunked(*parts)
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    decoder = ChunkDecoder(LIMIT, JSON_HEAD)
    for begin, end in itertools.pairwise(edges):
        assert decoder.feed(wire[begin:end]) == end - begin
    assert decoder.done
    assert bytes(decoder.body) == b"".join(parts)


chunk_tokens = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b"0", b"1", b"a", b"f", b";", b"x", b" ", b"3\r\nabc\r\n", b"0\r\n\r\n"]
)


@given(st.one_of(st.binary(max_size=60), st.lists(chunk_tokens, max_size=12).map(b"".join)), st.integers(1, 7))
def test_any_bytes_are_a_chunked_body_or_a_bad_request_in_any_split(data: bytes, step: int) -> None:
    def outcome(step: int) -> object:
        try:
            return decoded(data, limit=20, step=step)
        except BadRequest as error:
            return error.status

    assert outcome(step) == outcome(len(data) + 1)


# -- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (200, b"HTTP/1.1 200 OK"),
        (404, b"HTTP/1.1 404 Not Found"),
        (405, b"HTTP/1.1 405 Not Allowed"),
        (431, b"HTTP/1.1 431 Request Header Fields Too Large"),
        (599, b"HTTP/1.1 599 Unknown"),
    ],
)
def test_a_response_head_has_its_status_line(status: int, line: bytes) -> None:
    assert response_head(status, (), 0).split(b"\r\n")[0] == line


def test_a_response_head_says_how_long_and_whether_it_is_the_last() -> None:
    kept = response_head(200, ((b"A", b"b"),), 12)
    assert kept == b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 12\r\n\r\n"
    assert response_head(200, (), 0, keep_alive=False).endswith(b"Content-Length: 0\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("chunked", "keep_alive", "lines"),
    [
        (True, True, b"Transfer-Encoding: chunked"),
        (True, False, b"Transfer-Encoding: chunked\r\nConnection: close"),
        (False, True, b"Connection: close"),
        (False, False, b"Connection: close"),
    ],
)
def test_the_head_of_a_stream_says_how_it_ends(chunked: bool, keep_alive: bool, lines: bytes) -> None:
    head = stream_head(200, ((b"A", b"b"),), chunked=chunked, keep_alive=keep_alive)
    assert head == b"HTTP/1.1 200 OK\r\nA: b\r\n" + lines + b"\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
def test_pieces_come_back_out_of_their_chunks(pieces: list[bytes]) -> None:
    decoder = ChunkDecoder(LIMIT, JSON_HEAD)
    feed_all(decoder, b"".join([*map(chunk, pieces), LAST_CHUNK]))
    assert decoder.done
    assert bytes(decoder.body) == b"".join(pieces)


@pytest.mark.parametrize(("line", "old"), [("GET / HTTP/1.0", True), ("GET / HTTP/1.1", False)])
def test_a_head_knows_clients_of_http_1_0(line: str, old: bool) -> None:
    assert head_of(line).http10 is old


def test_a_body_that_is_too_large_is_refused_with_both_numbers() -> None:
    end = "Use --http-max-input-size to increase the limit."
    error = too_large(70, 60, JSON_HEAD)
    assert (error.status, error.plain) == (400, False)
    assert error.text == f"request JSON size of 70 bytes exceeds the maximum allowed input size of 60 bytes. {end}"
    error = too_large(70, 60, BINARY_HEAD)
    assert (error.status, error.plain) == (400, True)
    assert error.text == f"request body of 70 bytes exceeds the maximum allowed value of 60 bytes. {end}"


@pytest.mark.parametrize("most", [1, 3, 65_536])
def test_a_body_of_more_chunks_than_allowed_is_refused_as_soon_as_one_too_many_begins(most: int) -> None:
    decoder = ChunkDecoder(1 << 20, JSON_HEAD, most)
    feed_all(decoder, b"1\r\na\r\n" * most)
    assert len(decoder.body) == most
    with pytest.raises(BadRequest) as refused:
        decoder.feed(b"1\r\n")
    text = f"Chunked request body exceeds maximum of {most} non-empty chunks. Send fewer or larger HTTP chunks."
    assert (refused.value.status, refused.value.text, refused.value.plain) == (400, text, False)


def test_as_many_chunks_as_allowed_are_a_body_and_zero_allows_any_number() -> None:
    for most, sent in ((3, 3), (0, 70_000)):
        decoder = ChunkDecoder(1 << 20, JSON_HEAD, most)
        feed_all(decoder, b"1\r\na\r\n" * sent + b"0\r\n\r\n")
        assert decoder.done
        assert bytes(decoder.body) == b"a" * sent
