"""Errors as HTTP answers, with Retry-After."""

from __future__ import annotations

from remora.errors import QueueFullError, UnavailableError
from remora.protocols.rest.answer import encode_error
from remora.scheduling.batching import ExpiredError


def test_a_full_queue_answers_with_retry_after() -> None:
    answer = encode_error(QueueFullError("full"), plain=True)
    assert answer.status == 503
    assert (b"Retry-After", b"1") in answer.headers


def test_a_timeout_answers_with_retry_after() -> None:
    answer = encode_error(ExpiredError("Request timeout expired"), plain=True)
    assert answer.status == 503
    assert (b"Retry-After", b"1") in answer.headers
    assert b"".join(answer.body) == b'{"error":"Request timeout expired"}'


def test_a_longer_queue_answers_with_a_longer_retry_after() -> None:
    assert (b"Retry-After", b"7") in encode_error(QueueFullError("full", retry_after_s=7), plain=True).headers


def test_an_unavailable_error_without_a_wait_answers_without_retry_after() -> None:
    assert b"Retry-After" not in dict(encode_error(UnavailableError("stopping"), plain=True).headers)
