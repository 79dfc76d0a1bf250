"""Response cache in Redis, shared by several servers [K04].

Invariants:

1. Whatever Redis does, a request is answered: a look-up that fails is a miss, an insertion that fails is skipped.
2. No call blocks longer than its timeout, and a Redis that does not respond is not used for a while.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from uuid import uuid4

from remora.cache import CacheCounts, CacheStats
from remora.errors import ConfigError
from remora.messages import Response
from remora.system.install_advice import install_command
from remora_adapters.redis_cache.encoding import MAX_BYTES, decode, encode

_log = logging.getLogger("remora.cache")

_PREFIX = b"remora:1:"
_BACKOFF_NS = 1_000_000_000
"""Time without requests to Redis after a failure."""

_WRONG_TYPE = "WRONGTYPE"
"""Beginning of Redis' error for a key that holds another type, which another program has written."""
_WARNING_NS = 60_000_000_000
"""Minimum interval between warnings about such keys."""

_PENDING_BYTES = MAX_BYTES
"""Maximum memory of responses being sent to Redis; further ones are not stored."""


class RedisSettings(NamedTuple):
    """Address and timeouts of Redis, in milliseconds. Names and meanings are Triton's [K04]."""

    host: str
    port: int
    user: str = ""
    password: str = ""
    db: int = 0
    connect_timeout: int = 500
    socket_timeout: int = 250
    pool_size: int = 4
    wait_timeout: int = 100
    cert: str = ""
    key: str = ""
    cacert: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> RedisSettings:
        """Return the settings of text pairs.

        A timeout of 0, unlimited in Triton, means the default. Raises ValueError without the values in its text,
        because one of them is a secret.
        """
        missing = [name for name in ("host", "port") if not given.get(name)]
        if missing:
            raise ValueError(
                f"--cache-config=redis needs {' and '.join(missing)}: give --cache-config=redis,host=NAME and "
                "--cache-config=redis,port=NUMBER"
            )
        settings: dict[str, str | int] = {}
        for name, text in given.items():
            if name not in cls._fields:
                raise ValueError(
                    f"--cache-config=redis,{name}: there is no such setting; use one of {', '.join(cls._fields)}"
                )
            if isinstance(cls._field_defaults.get(name, "" if name == "host" else 0), str):
                settings[name] = text
            elif text.isascii() and text.isdigit():
                settings[name] = int(text) or int(cls._field_defaults.get(name, 0))
            else:
                raise ValueError(f"--cache-config=redis,{name}: expected a whole number")
        return cls(**settings)  # type: ignore[arg-type]


def open_cache(given: Mapping[str, str], now: Callable[[], int]) -> RedisCache:
    """Return the cache for the pairs of ``--cache-config``.

    Raises ValueError for bad settings, and as `RedisCache`.
    """
    return RedisCache(RedisSettings.of(given), now)


class RedisCache:
    """Response cache in Redis. See `remora.cache.ResponseCache`.

    Args:
        settings: address, credentials and timeouts.
        now: nanoseconds of the engine's monotonic clock.

    Raises ConfigError if Redis refuses the credentials, if the redis package is not installed, or if a TLS file cannot
    be used. If Redis is unreachable, only a warning is logged, so that a server starts while its cache is down.
    """

    remote = True

    def __init__(self, settings: RedisSettings, now: Callable[[], int]) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(f"--cache-config=redis needs the package redis: {install_command('redis')}") from error
        tls = bool(settings.cert or settings.key or settings.cacert)
        pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            max_connections=settings.pool_size,
            timeout=settings.wait_timeout / 1000,
            connection_class=redis.SSLConnection if tls else redis.Connection,
            host=settings.host,
            port=settings.port,
            username=settings.user or None,
            password=settings.password or None,
            db=settings.db,
            protocol=2,
            socket_connect_timeout=settings.connect_timeout / 1000,
            socket_timeout=settings.socket_timeout / 1000,
            retry=Retry(NoBackoff(), 0),
            **(_tls_of(settings) if tls else {}),
        )
        self._client = redis.Redis(connection_pool=pool)
        self._wrong_type: type[Exception] = redis.ResponseError
        self._now = now
        self._where = f"redis at {settings.host}:{settings.port}"
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(settings.pool_size, thread_name_prefix="remora cache")
        self._retry_at_ns = self._warn_at_ns = 0
        self._pending = 0
        self._counts = CacheCounts()
        # No two processes share an epoch, because the models of an ensemble may differ in another process.
        self._process = uuid4().int
        self._changes = 0
        self._ping(redis)

    def _ping(self, redis: object) -> None:
        from redis.exceptions import AuthenticationError, ResponseError

        try:
            self._client.ping()
        except (AuthenticationError, ResponseError) as error:
            self.close()
            raise ConfigError(f"{self._where} refuses the server: {error}") from error
        except Exception as error:
            self._failed(error)

    def lookup(self, key: bytes) -> Response | None:
        """Look up a response. Blocks up to the timeouts. See `ResponseCache`."""
        begin_ns = self._now()
        response = self._fetch(key, begin_ns)
        with self._lock:
            self._counts.add_lookup(self._now() - begin_ns, hit=response is not None)
        return response

    def _fetch(self, key: bytes, now_ns: int) -> Response | None:
        if now_ns < self._retry_at_ns:
            return None
        try:
            # Check the length before fetching, because other programs may have written this key.
            size = self._client.strlen(_PREFIX + key)
            if not isinstance(size, int):
                raise TypeError(f"the length of a value is {type(size).__name__}, not a number")
            if size > MAX_BYTES:
                return None
            data = self._client.get(_PREFIX + key)
            if not isinstance(data, bytes | None):
                raise TypeError(f"a value is {type(data).__name__}, not bytes")
        except Exception as error:  # whatever the library raises for replies of another server or program
            self._failed(error)
            return None
        if data is None:
            return None
        try:
            return decode(data)
        except ValueError as error:
            _log.warning("%s: %s", self._where, error)
            return None

    def insert(self, key: bytes, response: Response) -> None:
        """Store a response. It is copied now and sent by a thread. See `ResponseCache`."""
        begin_ns = self._now()
        if begin_ns < self._retry_at_ns:
            return
        data = encode(response)
        if data is None:
            return
        with self._lock:
            if self._pending + len(data) > _PENDING_BYTES:
                return
            self._pending += len(data)
        try:
            self._threads.submit(self._send, key, data, begin_ns)
        except RuntimeError:  # the cache is being closed
            with self._lock:
                self._pending -= len(data)

    def _send(self, key: bytes, data: bytes, begin_ns: int) -> None:
        try:
            if self._now() >= self._retry_at_ns:
                self._client.set(_PREFIX + key, data)
        except Exception as error:
            self._failed(error)
        finally:
            with self._lock:
                self._pending -= len(data)
                self._counts.insertion_ns += self._now() - begin_ns

    def _failed(self, error: Exception) -> None:
        """Stop using Redis for a while, so that its threads are free and requests miss at once.

        An error that is about one key is logged only, because the other keys work.
        """
        if isinstance(error, self._wrong_type) and str(error).startswith(_WRONG_TYPE):
            self._warn_of_key(error)
            return
        with self._lock:
            already_failed = self._now() < self._retry_at_ns
            self._retry_at_ns = self._now() + _BACKOFF_NS
        if not already_failed:
            _log.warning("%s does not answer (%s): requests run without the cache", self._where, error)

    def _warn_of_key(self, error: Exception) -> None:
        now_ns = self._now()
        with self._lock:
            is_due = now_ns >= self._warn_at_ns
            if is_due:
                self._warn_at_ns = now_ns + _WARNING_NS
        if is_due:
            _log.warning("%s: a key holds a value of another type and is not used: %s", self._where, error)

    def run(self, work: Callable[[], None]) -> None:
        """Run work that may block, in a thread of the cache."""
        try:
            self._threads.submit(work)
        except RuntimeError:  # the cache is being closed
            work()

    def scope(self, model: str, version: int, fingerprint: bytes = b"") -> bytes:
        """Return the key prefix of a model with these files, which other servers share."""
        return repr((model, version, fingerprint)).encode()

    def models_changed(self) -> None:
        """See `ResponseCache`."""
        with self._lock:
            self._changes += 1

    @property
    def epoch(self) -> int:
        """See `ResponseCache`."""
        return self._process + self._changes

    @property
    def pending_bytes(self) -> int:
        """Size of the responses that are being sent to Redis."""
        with self._lock:
            return self._pending

    def stats(self) -> CacheStats:
        """Return the statistics. Redis' size and evictions are unknown. See `ResponseCache`."""
        with self._lock:
            counts = self._counts
            return CacheStats(math.nan, math.nan, counts.hits, counts.misses, 0, counts.lookup_ns, counts.insertion_ns)

    def close(self) -> None:
        """Send pending responses, then end the threads and the connections."""
        self._threads.shutdown()
        self._client.close()
        self._client.connection_pool.disconnect()


def _tls_of(settings: RedisSettings) -> dict[str, str | None]:
    """Return the TLS arguments of a connection. Raises ConfigError for unusable files."""
    import ssl  # imported here, because few caches need it

    if settings.key and not settings.cert:
        raise ConfigError("--cache-config=redis,key needs its certificate: give --cache-config=redis,cert=FILE")
    trial = ssl.create_default_context()
    try:
        if settings.cacert:
            trial.load_verify_locations(settings.cacert)
        if settings.cert:
            trial.load_cert_chain(settings.cert, settings.key or None, password="")  # because None would prompt
    except OSError as error:
        names = ", ".join(name for name in ("cert", "key", "cacert") if getattr(settings, name))
        raise ConfigError(f"--cache-config=redis: the PEM files of {names} cannot be used: {error}") from error
    return {
        "ssl_certfile": settings.cert or None,
        "ssl_keyfile": settings.key or None,
        "ssl_ca_certs": settings.cacert or None,
    }
