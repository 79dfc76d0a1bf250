"""Signing keys that change, are missing or are rotated, and how long a token is remembered."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import free_ports
from remora.protocols.tokens import IssuerError, TokenError, TokenTerms, UnknownKeyError
from remora.server import token_check
from remora.server.token_check import ReloadPlan, TokenCheck, fetch_keys
from support.servers.issuer import AUDIENCE, ISSUER, Key, KeyServer, key_set, token

PATIENCE_S = 60.0
NOW = 1_800_000_000.0
TERMS = TokenTerms(ISSUER, (AUDIENCE,))
OLD, NEW = Key("old"), Key("new")
URL = "https://issuer.example/keys?secret=1"


class Clock:
    """Wall clock and monotonic clock that a test turns."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return NOW + self.at


class Issuer:
    """What a URL answers; a fetch waits while `gate` is closed."""

    def __init__(self, content: bytes | Exception) -> None:
        self.content = content
        self.gate = threading.Event()
        self.gate.set()
        self.fetches = 0

    def fetch(self, url: str) -> bytes:
        self.fetches += 1
        assert self.gate.wait(PATIENCE_S)
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


def name_of(check: TokenCheck, text: str) -> str:
    found = check.find(text.encode())
    return "" if found is None else found.name


def write(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    os.replace(draft, path)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, changes = tmp_path / "jwks.json", []
    write(path, key_set(OLD))
    check = TokenCheck(str(path), TERMS, lambda: 0.0, lambda: NOW)
    check.changed = lambda: changes.append(1)
    old, new = token(OLD, NOW + 60), token(NEW, NOW + 60)
    assert (name_of(check, old), name_of(check, new)) == ("jwt:ann", "")

    async def look() -> None:
        check.reread()

    asyncio.run(look())
    assert changes == []
    write(path, key_set(NEW))
    asyncio.run(look())
    assert (name_of(check, old), name_of(check, new)) == ("", "jwt:ann"), "a token of a withdrawn key is remembered"
    assert changes == [1]


def test_a_file_that_became_unreadable_leaves_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "jwks.json"
    write(path, key_set(OLD))
    check = TokenCheck(str(path), TERMS, lambda: 0.0, lambda: NOW)

    async def look() -> None:
        for _ in range(3):
            check.reread()

    write(path, b"{")
    with caplog.at_level(logging.ERROR, "remora.keys"):
        asyncio.run(look())
    assert [record.getMessage() for record in caplog.records if record.name == "remora.keys"] == [
        f"the signing keys stay as they were: {path}: not JSON"
    ]
    assert name_of(check, token(OLD, NOW + 60))


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"{}", "expected a JSON Web Key Set"), (b"x", "not JSON")]
)
def test_a_wrong_file_fails_the_start(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "jwks.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"--jwt-jwks=.*jwks.json: {reason}"):
        TokenCheck(str(path), TERMS, lambda: 0.0)


@pytest.mark.parametrize(
    "url",
    ["http://issuer.example/keys", "ftp://127.0.0.1/keys", "http://u:p@evil/k?x=secret", "http://u:p/secret@evil/k"],
)
def test_keys_are_not_fetched_in_plain_text(url: str) -> None:
    with pytest.raises(ValueError, match="expected a file, https://") as caught:
        TokenCheck(url, TERMS, lambda: 0.0)
    assert "secret" not in str(caught.value)
    assert "u:p" not in str(caught.value)


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_a_token_is_verified_once_and_forgotten_when_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, changes, verified = Clock(), [], []
    path = tmp_path / "jwks.json"
    write(path, key_set(OLD))
    check = TokenCheck(str(path), TERMS, clock.now, clock.wall)
    check.changed = lambda: changes.append(clock.at)
    plain = token_check.verify
    monkeypatch.setattr(token_check, "verify", lambda *asked: verified.append(1) or plain(*asked))
    text = token(OLD, NOW + 10)
    assert [name_of(check, text) for _ in range(3)] == ["jwt:ann"] * 3
    assert len(verified) == 1

    async def look() -> None:
        check.reread()

    clock.at = 9.0
    asyncio.run(look())
    assert changes == []
    clock.at = 10.0
    assert name_of(check, text) == ""
    asyncio.run(look())
    assert changes == [10.0]
    assert not check._verified


def test_the_tokens_that_are_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_check, "_MOST_TOKENS", 3)
    path = tmp_path / "jwks.json"
    write(path, key_set(OLD))
    check = TokenCheck(str(path), TERMS, lambda: 0.0, lambda: NOW)
    for number in range(10):
        assert name_of(check, token(OLD, NOW + 60, sub=str(number)))
        assert len(check._verified) <= 3


def test_the_expiry_of_a_token_that_others_have_displaced_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_check, "_MOST_TOKENS", 3)
    clock, changes = Clock(), []
    path = tmp_path / "jwks.json"
    write(path, key_set(OLD))
    check = TokenCheck(str(path), TERMS, clock.now, clock.wall)
    check.changed = lambda: changes.append(clock.at)
    for expiry in (10, 60, 70, 80, 90):
        assert name_of(check, token(OLD, NOW + expiry))
    assert len(check._verified) == 2  # the last ones

    async def look() -> None:
        check.reread()

    for clock.at in (9.0, 10.0, 11.0, 60.0, 80.0, 80.5, 90.0, 200.0):
        asyncio.run(look())
    assert changes == [10.0, 80.0, 90.0]


# -- URLs -----------------------------------------------------------------------------------------------------------


def test_tokens_are_refused_until_the_keys_of_a_url_are_fetched(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        clock, issuer = Clock(), Issuer(OSError(111, "Connection refused"))
        check = TokenCheck(URL, TERMS, clock.now, clock.wall, issuer.fetch)
        text = token(OLD, NOW + 60).encode()
        check.reread()
        await until(lambda: check._failed)
        with pytest.raises(IssuerError):
            check.verify(text)
        check.reread()
        assert issuer.fetches == 1, "fetched again at once"
        issuer.content = key_set(OLD)
        clock.at = 1.0
        check.reread()
        await until(lambda: check.find(text))

    with caplog.at_level(logging.INFO, "remora.keys"):
        asyncio.run(run())
    where = "https://issuer.example/keys"
    assert [record.getMessage() for record in caplog.records if record.name == "remora.keys"] == [
        f"the signing keys are missing, so that tokens are refused: {where}: Connection refused",
        f"1 signing keys from {where}",
    ]


def test_a_fetch_that_gets_no_thread_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    async def run() -> None:
        clock, issuer = Clock(), Issuer(key_set(OLD))
        check = TokenCheck(URL, TERMS, clock.now, clock.wall, issuer.fetch)
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", NoThread)
            check.reread()
        assert "can't start new thread" in caplog.text
        clock.at = 1.0
        check.reread()
        await until(lambda: check.find(token(OLD, NOW + 60).encode()))

    asyncio.run(run())


def test_an_unknown_kid_has_the_keys_fetched_at_once_and_seldom() -> None:
    async def run() -> None:
        clock, issuer = Clock(), Issuer(key_set(OLD))
        check = TokenCheck(URL, TERMS, clock.now, clock.wall, issuer.fetch)
        changes: list[int] = []
        check.changed = lambda: changes.append(issuer.fetches)
        old, new, odd = (token(key, NOW + 600).encode() for key in (OLD, NEW, Key("odd")))
        check.reread()
        await until(lambda: changes == [1])
        issuer.content = key_set(OLD, NEW)
        with pytest.raises(UnknownKeyError):
            check.verify(new)  # the first fetch was a moment ago
        clock.at = ReloadPlan.wanted_s
        issuer.gate.clear()
        with pytest.raises(IssuerError):
            check.verify(new)
        with pytest.raises(IssuerError):
            check.verify(odd)
        assert check.find(old), "known keys wait for the fetch"
        issuer.gate.set()
        await until(lambda: changes == [1, 2])
        assert check.find(new)
        with pytest.raises(UnknownKeyError):
            check.verify(odd)
        assert issuer.fetches == 2
        clock.at += ReloadPlan.usual_s
        issuer.content = key_set(NEW)
        check.reread()
        await until(lambda: changes == [1, 2, 3])
        assert (check.find(old), bool(check.find(new))) == (None, True)

    asyncio.run(run())


def test_known_keys_outlive_an_issuer_that_is_down(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        clock, issuer = Clock(), Issuer(key_set(OLD))
        check = TokenCheck(URL, TERMS, clock.now, clock.wall, issuer.fetch)
        check.reread()
        text = token(OLD, NOW + 10_000).encode()
        await until(lambda: check.find(text))
        issuer.content = ValueError("not JSON")
        for _ in range(4):
            clock.at += ReloadPlan.usual_s
            before = issuer.fetches
            check.reread()
            await until(lambda before=before: issuer.fetches > before and not check._plan.running)
            assert check.find(text)

    with caplog.at_level(logging.ERROR, "remora.keys"):
        asyncio.run(run())
    (record,) = [each for each in caplog.records if each.name == "remora.keys"]
    assert "stay as they were" in record.getMessage()


def test_fetches_are_repeated_after_growing_pauses() -> None:
    plan, now, begun = ReloadPlan(), 0.0, []
    while len(begun) < 9:
        if plan.is_due(now):
            begun.append(now)
            plan.begin(now)
            assert not plan.is_due(now + 1000)
            plan.end(now, failed=len(begun) < 8)
        now += 0.5
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 300]


# -- the fetch ------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fetches wait for an issuer in this process as long as a busy machine needs."""
    monkeypatch.setattr(token_check, "_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(token_check, "_FETCH_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_a_set_is_fetched_over_http() -> None:
    with KeyServer(key_set(OLD)) as server:
        assert fetch_keys(server.url) == server.content


@pytest.mark.usefixtures("patient")
def test_a_redirect_an_error_and_an_endless_answer_are_failures() -> None:
    with KeyServer(b"x") as server:
        for status in (302, 404, 503):
            server.status = status
            with pytest.raises(OSError, match=str(status)):
                fetch_keys(server.url)
        assert server.asked == 3, "a redirect was followed"
        server.status, server.content = 200, b"x" * (2 << 20)
        with pytest.raises(OSError, match="longer than 1048576 bytes"):
            fetch_keys(server.url)
    with pytest.raises(OSError, match="refused"):
        fetch_keys(f"http://127.0.0.1:{free_ports(1)[0]}/jwks.json")


def test_the_start_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jwt", None)
    with pytest.raises(ValueError, match="--jwt-jwks needs PyJWT: pip install"):
        TokenCheck(URL, TERMS, lambda: 0.0)


def test_a_refusal_names_no_token() -> None:
    text = token(Key("old"), NOW + 60)
    with pytest.raises(TokenError) as caught:
        TokenCheck(URL, TERMS, lambda: 0.0).verify(text.encode())
    assert text not in str(caught.value)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_token_that_is_verified_while_its_key_is_withdrawn_is_not_remembered(tmp_path: Path, number: int) -> None:
    path = tmp_path / "jwks.json"

    class Changing(TokenCheck):
        """Check whose keys change just before it uses its memory the given number of times."""

        left = -1

        @property
        def _verified(self) -> object:  # type: ignore[override]
            self.left -= 1
            if not self.left:
                asyncio.run(look())
            return self.__dict__["_verified"]

        @_verified.setter
        def _verified(self, memory: object) -> None:
            self.__dict__["_verified"] = memory

    async def look() -> None:
        check.left = -1
        write(path, key_set(NEW))
        check.reread()

    write(path, key_set(OLD))
    check = Changing(str(path), TERMS, lambda: 0.0, lambda: NOW)
    old = token(OLD, NOW + 60)
    check.left = number
    check.find(old.encode())
    if check.left >= 0:  # this check does not use it so often
        asyncio.run(look())
    assert name_of(check, old) == ""
