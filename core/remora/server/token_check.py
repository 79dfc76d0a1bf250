"""Check of JSON Web Tokens: the issuer's signing keys and a memo of valid tokens.

Keys of a URL are fetched in a thread, never in the event loop: at the start, every few minutes, and at once for a token
that names an unknown key, which an issuer introduces when it rotates its keys.

Invariant: no token is accepted more than a second after it has expired.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf

from remora.protocols.api_keys import Caller
from remora.protocols.cross_site import is_loopback
from remora.protocols.tokens import IssuerError, SigningKeys, TokenError, TokenTerms, UnknownKeyError, Verified, verify
from remora.system.install_advice import install_command
from remora.system.url_secrets import shown_place, without_secrets

_log = logging.getLogger("remora.keys")

_MOST_TOKENS = 4096
_MOST_BYTES = 1 << 20
_FETCH_S = 10.0
_WAIT_S = 5.0


class ReloadPlan:
    """When the signing keys of a URL are fetched. Pure: times are monotonic seconds."""

    usual_s = 300.0
    """Interval of fetches."""
    wanted_s = 30.0
    """Shortest interval of fetches for unknown keys, because a client may make keys up."""
    most_retry_s = 60.0

    def __init__(self) -> None:
        self.running = False
        self._at = 0.0
        self._begun = -self.wanted_s
        self._retry_s = 1.0

    def is_due(self, now: float, *, wanted: bool = False) -> bool:
        """Return True if a fetch is to begin; ``wanted`` means that a token names an unknown key."""
        if self.running:
            return False
        return now >= self._at or (wanted and now >= self._begun + self.wanted_s)

    def begin(self, now: float) -> None:
        """Note that a fetch has begun."""
        self.running = True
        self._begun = now

    def end(self, now: float, *, failed: bool) -> None:
        """Note that a fetch has ended; a failed one is repeated after a growing pause."""
        self.running = False
        self._at = now + (self._retry_s if failed else self.usual_s)
        self._retry_s = min(self._retry_s * 2, self.most_retry_s) if failed else 1.0


class TokenCheck:
    """Signing keys and the tokens found valid. `find` and `verify` are thread-safe.

    Args:
        place: path or URL of the JSON Web Key Set.
        terms: what a token must say.
        now: monotonic time in seconds.
        wall: time since the epoch in seconds.
        fetch: returns the content of a URL; it may block. Raises OSError, ValueError.

    Raises ValueError if a file cannot be read, the URL is not safe, or PyJWT is not installed.
    """

    def __init__(
        self,
        place: str,
        terms: TokenTerms,
        now: Callable[[], float],
        wall: Callable[[], float] = time.time,
        fetch: Callable[[str], bytes] | None = None,
    ) -> None:
        try:
            import jwt  # noqa: F401  # tested here, because a token that arrives later could only be refused
        except ImportError as error:
            raise ValueError(f"--jwt-jwks needs PyJWT: {install_command('jwt')}") from error
        self._place = place
        self._terms = terms
        self._now = now
        self._wall = wall
        self._fetch = fetch or fetch_keys
        self._remote = "://" in place
        self._shown = _without_user_and_query(place) if self._remote else place
        self._plan = ReloadPlan()
        self._keys: SigningKeys | None = None
        self._seen: object = None
        self._verified: dict[bytes, Verified] = {}
        self._expiry_s = inf  # of the first token to expire, which others may have displaced from the memo
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed = False
        self._change_level, self._error_level = logging.INFO, logging.ERROR
        self.changed: Callable[[], None] = lambda: None
        """Called in the loop's thread when tokens that were valid may not be so any more, or the reverse."""
        if self._remote:
            _check_url(place)
        else:
            try:
                self._read()
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"--jwt-jwks={shown_place(place)}: {getattr(error, 'strerror', None) or error}"
                ) from error

    # -- tokens -----------------------------------------------------------------------------------------------------

    def find(self, token: bytes) -> Caller | None:
        """Return the holder of a valid token, None for another one."""
        try:
            return self.verify(token)
        except TokenError:
            return None

    def verify(self, token: bytes) -> Caller:
        """Return the holder of a token. Raises TokenError."""
        now = self._wall()
        known = self._verified.get(token)
        if known is not None and now < known.until_s:
            return known.caller
        memo, keys = self._verified, self._keys  # in this order, because `_use` replaces them in the opposite one
        if keys is None:
            raise IssuerError
        try:
            verified = verify(token, keys, self._terms, now)
        except UnknownKeyError as error:
            if self._remote and self._begin_reload(wanted=True):
                raise IssuerError from error
            raise
        with self._lock:
            if len(memo) >= _MOST_TOKENS:
                memo.clear()
            memo[token] = verified  # of these keys, because another thread may have withdrawn one meanwhile
            self._expiry_s = min(self._expiry_s, verified.until_s)
        return verified.caller

    # -- signing keys -----------------------------------------------------------------------------------------------

    def log_no_changes(self) -> None:
        """See `KeyCheck.log_no_changes`."""
        self._change_level = self._error_level = logging.DEBUG

    def reread(self) -> None:
        """Drop expired tokens, and read or fetch the keys if that is due. Call it every second."""
        self._loop = asyncio.get_running_loop()
        if self._drop_expired(self._wall()):
            self.changed()
        if self._remote:
            self._begin_reload()
            return
        try:
            if _identity(os.stat(self._place)) == self._seen:
                return
            self._read()
        except (OSError, ValueError) as error:
            self._report(error)
        else:
            self._use(self._keys)

    def _drop_expired(self, now: float) -> bool:
        """Forget expired tokens, and return True if any has expired that was found valid."""
        with self._lock:
            if now < self._expiry_s:
                return False
            memo = self._verified
            for token in [token for token, verified in memo.items() if now >= verified.until_s]:
                del memo[token]
            self._expiry_s = min((verified.until_s for verified in memo.values()), default=inf)
        return True

    def _read(self) -> None:
        with open(self._place, "rb") as file:
            self._seen = _identity(os.fstat(file.fileno()))
            self._keys = SigningKeys(file.read(_MOST_BYTES + 1))

    def _begin_reload(self, *, wanted: bool = False) -> bool:
        """Fetch the keys in a thread if that is due; return True while they are being fetched."""
        with self._lock:
            if self._loop is not None and self._plan.is_due(self._now(), wanted=wanted):
                self._plan.begin(self._now())
                try:
                    threading.Thread(target=self._reload, name="remora jwks", daemon=True).start()
                except RuntimeError as error:  # the process may have no more threads
                    self._plan.end(self._now(), failed=True)
                    self._report(error)
            return self._plan.running

    def _reload(self) -> None:
        found: SigningKeys | Exception
        try:
            found = SigningKeys(self._fetch(self._place))
        except Exception as error:  # whatever a broken server sends must not end the fetches
            found = error
        loop = self._loop
        assert loop is not None  # because the thread was begun with one
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(partial(self._take, found))

    def _take(self, found: SigningKeys | Exception) -> None:
        failed = isinstance(found, Exception)
        with self._lock:
            self._plan.end(self._now(), failed=failed)
        if isinstance(found, Exception):
            self._report(found)
        else:
            self._use(found)

    def _use(self, keys: SigningKeys | None) -> None:
        first, self._keys = self._keys is None or self._failed, keys
        self._failed = False
        self._verified = {}  # a key may be withdrawn
        self.changed()
        if keys is not None:
            _log.log(self._change_level if first else logging.DEBUG, "%d signing keys from %s", len(keys), self._shown)

    def _report(self, error: Exception) -> None:
        if not self._failed:  # once until it succeeds
            reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
            state = "stay as they were" if self._keys is not None else "are missing, so that tokens are refused"
            _log.log(self._error_level, "the signing keys %s: %s: %s", state, self._shown, reason)
        self._failed = True


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_url(url: str) -> None:
    """Raise ValueError for a URL whose content others could replace on its way."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        return
    raise ValueError(f"--jwt-jwks={_without_user_and_query(url)}: expected a file, https://, or http:// on loopback")


def _without_user_and_query(url: str) -> str:
    return without_secrets(url).replace("***@", "").removesuffix("?***")


def fetch_keys(url: str) -> bytes:
    """Return the content of a URL, at most 1 MiB. Raises OSError."""
    from remora.system.http_client import Limits, fetch  # imported here, because few servers fetch keys

    answer = fetch(url, Limits(_WAIT_S, _MOST_BYTES, _FETCH_S))
    if not answer.is_success:
        raise OSError(None, f"the server answered {answer.status}")
    return answer.body
