"""Callers of requests: each checked key is one, and all others are one."""

from __future__ import annotations

import pytest

from remora.options.roles import INFER
from remora.protocols.api_keys import Caller
from remora.protocols.http1 import Head
from remora_llm.routes.openai import _caller_of


def user_of(*headers: tuple[bytes, bytes], caller: Caller | None = None) -> str:
    head = Head("POST", "/v1/completions", headers)
    head.caller = caller
    return _caller_of(head)


@pytest.mark.parametrize(
    "header", [(b"x-api-key", b"one"), (b"authorization", b"Bearer one"), (b"authorization", b"Basic one")]
)
def test_a_header_that_is_not_checked_names_no_caller(header: tuple[bytes, bytes]) -> None:
    assert user_of(header) == user_of() == ""


def test_a_checked_key_is_one_user_by_its_name() -> None:
    caller = Caller("ann", ("infer",), frozenset((INFER,)))
    assert user_of((b"x-api-key", b"one"), caller=caller) == "ann"
