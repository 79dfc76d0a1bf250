"""Client side of HTTP/1.1: answers in any pieces, and damaged ones."""

from __future__ import annotations

import pytest

from remora_tools.load import Answer
from remora_tools.load.http_codec import HttpCodec, reason_in

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
FAILED = b"HTTP/1.1 503 No\r\ncontent-length: 2\r\nConnection: close\r\n\r\n{}"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
EVENTS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


@pytest.mark.parametrize(
    ("wire", "failure", "closes", "events"),
    [
        (PLAIN, "", False, 0),
        (EMPTY, "", False, 0),
        (FAILED, "HTTP 503", True, 0),
        (CHUNKS, "", False, 0),
        (EVENTS, "", False, 2),
    ],
)
def test_an_answer_is_complete_with_its_last_byte(wire: bytes, failure: str, closes: bool, events: int) -> None:
    for cut in range(1, len(wire)):
        codec = HttpCodec()
        for _ in range(2):  # the second answer on the same connection
            first = codec.feed(wire[:cut], 1)
            assert first is None or wire is CHUNKS or wire is EVENTS
            answer = first or codec.feed(wire[cut:], 2)
            assert answer is not None
            assert (answer.failure, answer.closes, len(answer.events_ns)) == (failure, closes, events)
            if first is not None:
                break
    codec = HttpCodec()
    assert [codec.feed(wire[place : place + 1], place) is not None for place in range(len(wire))].count(True) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": "unexpected shape"}', "unexpected shape"),
        (b'{"error": {"message": "no such model", "type": "x"}}', "no such model"),
        (b'{"error": " two\\r\\nlines \\u001b[31mred \\u202e \\ud800"}', r"two lines \x1b[31mred \u202e \ud800"),
        (b'{"error": "%b"}' % (b"x" * 151), "x" * 150 + "..."),
        (b'{"error": "%b"}' % (b"x" * 150), "x" * 150),
        (b'{"error": {"code": 5}}', ""),
        (b'{"detail": "other"}', ""),
        (b'["error"]', ""),
        (b'{"error": "to', ""),
        (b"[" * 65_536, ""),
        (b"\xff\xfe<html>", ""),
    ],
)
def test_a_failure_has_the_reason_of_its_body_in_one_line(body: bytes, reason: str) -> None:
    plain = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    chunks = b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    codec = HttpCodec()
    for wire in (plain, chunks):
        assert codec.feed(wire[:50], 1) is None
        answer = codec.feed(wire[50:], 2)
        assert answer is not None
        assert (answer.failure, reason_in(answer.body)) == ("HTTP 400", reason)
    good = codec.feed(PLAIN, 3)
    assert good is not None
    assert good.body == b""


def test_a_long_body_of_a_failure_is_not_kept() -> None:
    codec = HttpCodec()
    codec.feed(b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n", 1)
    for _ in range(9):
        assert codec.feed(b"x" * 100_000, 2) is None
    answer = codec.feed(b"x" * 100_000, 3)
    assert answer is not None
    assert len(answer.body) == 65_536


def test_events_have_the_times_of_their_bytes() -> None:
    codec = HttpCodec()
    head, _, rest = EVENTS.partition(b"9\r\n")
    first, _, last = rest.partition(b"9\r\n")
    assert codec.feed(head, 1) is None
    assert codec.feed(b"9\r\n" + first, 20) is None
    assert codec.feed(b"9\r\n" + last, 30) == Answer("", (20, 30), False)


def _streamed(*events: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    lines = [f"data: {event}\n\n".encode() for event in (*events, "[DONE]")]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in lines) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("events", "with_tokens", "tokens"),
    [
        (
            (
                '{"choices":[{"delta":{"role":"assistant","content":""}}]}',
                '{"choices":[{"delta":{"content":"a"}}]}',
                '{"choices": [{"delta": {"content": "b \\"text\\": \\"\\""}}]}',
                '{"choices":[{"delta":{},"finish_reason":"stop"}]}',
                '{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}',
            ),
            2,
            7,
        ),
        (('{"choices":[{"text":"a"}]}', '{"choices":[{"text": "", "finish_reason":"length"}]}'), 1, 0),
        (('{"text_output":"a","usage":{"completion_tokens":1}}', '{"usage":{"completion_tokens":2}}'), 2, 2),
    ],
)
def test_events_without_tokens_do_not_count_and_the_number_of_tokens_is_read(
    events: tuple[str, ...], with_tokens: int, tokens: int
) -> None:
    codec = HttpCodec()
    answer = codec.feed(_streamed(*events), 3)
    assert answer == Answer("", (3,) * with_tokens, False, tokens)
    assert codec.feed(_streamed("1"), 4) == Answer("", (4,)), "the next answer begins at zero"


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    codec = HttpCodec()
    assert codec.feed(b"HTTP/1.0 200 OK\r\n\r\nabc", 1) is None
    assert codec.feed(b"def", 2) is None
    assert codec.end() == Answer("", (), True)
    assert HttpCodec().end() is None


@pytest.mark.parametrize(
    "wire", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000, CHUNKS.replace(b"10\r\n", b"zz\r\n")]
)
def test_damaged_answers_are_refused(wire: bytes) -> None:
    with pytest.raises(ValueError, match=r"HTTP/1\.1|longer than|no length"):
        HttpCodec().feed(wire, 1)
