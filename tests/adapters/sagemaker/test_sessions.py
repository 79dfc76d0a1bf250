"""Session headers as sequences: what the platform's own patterns accept, and that the body's word holds."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_adapters.sagemaker.sessions import NEW, Session, as_sequence, headers_of, session_of

# As the service model of botocore has them.
NEW_SESSION = re.compile(
    rb"^[a-zA-Z0-9](-*[a-zA-Z0-9])*;\sExpires=[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"
)
BODY = b'{"inputs": []}'


def test_without_a_header_there_is_no_session() -> None:
    assert session_of(None, "new") is None


def test_new_session_opens_one_with_the_new_id_and_an_id_goes_on_with_it() -> None:
    assert session_of(NEW, "abc") == Session("abc", opens=True)
    assert session_of(b"abc", "other") == Session("abc", opens=False)


@pytest.mark.parametrize("value", [b"", b"-a", b"a-", b"a b", b"a/b", b"..", b"\xff", b"a" * 129])
def test_an_id_that_the_platform_would_not_pass_on_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="session id"):
        session_of(value, "new")


def test_the_first_request_starts_the_sequence_and_later_ones_go_on() -> None:
    for session, starts in ((Session("s1", opens=True), True), (Session("s1", opens=False), False)):
        body, length, ends = as_sequence(BODY, len(BODY), session)
        assert json.loads(body[:length])["parameters"] == {"sequence_id": "s1", "sequence_start": starts}
        assert not ends


def test_what_the_body_says_of_its_sequence_holds_and_its_end_closes_the_session() -> None:
    text = b'{"inputs": [], "parameters": {"sequence_id": 7, "sequence_end": true}}'
    body, length, ends = as_sequence(text + b"\x01\x02", len(text), Session("s1", opens=False))
    assert json.loads(body[:length])["parameters"]["sequence_id"] == 7
    assert body[length:] == b"\x01\x02"
    assert ends


@given(st.binary(max_size=60))
def test_a_body_that_is_not_a_request_passes_as_it_is(body: bytes) -> None:
    try:
        if isinstance(json.loads(body), dict):
            return
    except ValueError:
        pass
    assert as_sequence(body, len(body), Session("s", opens=True)) == (body, len(body), False)


def test_the_headers_are_of_the_form_that_clients_check() -> None:
    headers = dict(headers_of(Session("a" * 32, opens=True), ends=True, now_s=1_700_000_000.0, idle_s=60))
    assert NEW_SESSION.match(headers[b"X-Amzn-SageMaker-New-Session-Id"])
    assert headers[b"X-Amzn-SageMaker-New-Session-Id"].endswith(b"Expires=2023-11-14T22:14:20Z")
    assert headers[b"X-Amzn-SageMaker-Closed-Session-Id"] == b"a" * 32
    assert headers_of(Session("a", opens=False), ends=False, now_s=0.0, idle_s=1) == ()
