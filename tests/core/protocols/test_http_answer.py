"""Errors as HTTP answers: who may come again is told when."""

from __future__ import annotations

from remora.errors import QueueFullError, UnavailableError
from remora.protocols.http_answer import encode_error


def test_who_found_the_queue_full_is_told_when_to_come_again() -> None:
    answer = encode_error(QueueFullError("full"), plain=True)
    assert answer.status == 503
    assert (b"Retry-After", b"1") in answer.headers


def test_nobody_else_is() -> None:
    assert b"Retry-After" not in dict(encode_error(UnavailableError("stopping"), plain=True).headers)
