"""Callers of requests: each key is one."""

from __future__ import annotations

from remora.options.roles import INFER
from remora.protocols.api_keys import Caller
from remora.protocols.http1 import Head
from remora.server.http.openai import _caller_of


def user_of(*headers: tuple[bytes, bytes], caller: Caller | None = None) -> str:
    head = Head("POST", "/v1/completions", headers)
    head.caller = caller
    return _caller_of(head)


def test_clients_with_the_preferred_header_are_as_many_users_as_they_have_keys() -> None:
    platform = (b"authorization", b"Bearer of the platform")
    assert user_of((b"X-API-Key", b"one"), platform) == user_of((b"x-api-key", b"one"), platform)
    assert user_of((b"x-api-key", b"one"), platform) != user_of((b"x-api-key", b"two"), platform)
    assert user_of((b"x-api-key", b"one")) == user_of((b"authorization", b"Bearer one"))
    assert "one" not in user_of((b"x-api-key", b"one"))


def test_a_client_that_a_platform_authenticates_otherwise_is_a_user() -> None:
    assert "" != user_of((b"authorization", b"Basic one")) != user_of((b"authorization", b"Basic two"))
    assert user_of() == ""


def test_a_checked_key_is_one_user_by_its_name() -> None:
    caller = Caller("ann", ("infer",), frozenset((INFER,)))
    assert user_of((b"x-api-key", b"one"), caller=caller) == "ann"
