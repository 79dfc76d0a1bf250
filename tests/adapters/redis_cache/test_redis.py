"""The cache in Redis: a real server, over TLS too, one that goes away, one that never answers, one with a password."""

from __future__ import annotations

import itertools
import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from conftest import free_ports
from remora.calls import ModelStatistics
from remora.engine import Engine
from remora.errors import ConfigError
from remora.management.metrics import MetricsExporter, page_text
from remora.messages import Response, Tensor
from remora.models import loader as loading
from remora.options import EngineOptions
from remora.server.startup import with_secrets
from remora.statistics import MetricsSettings
from remora_adapters.redis_cache import RedisCache, RedisSettings
from remora_adapters.redis_cache.encoding import MAX_BYTES
from support.engine.fakes import DOUBLER, FakeBackend, FakeClock, write_model

redis = pytest.importorskip("redis", reason="needs redis: pip install '.[redis]'")
SERVER = shutil.which("redis-server") or ""
needs_server = pytest.mark.skipif(not SERVER, reason="needs a real Redis: apt-get install redis-server")
PASSWORD = "s3cret"
PATIENCE_MS = 30_000
KEY = b"k" * 32


class Redis:
    """A real server on another port; `kill` and `start` play a restart."""

    def __init__(self, folder: Path, *arguments: str, tls: bool = False) -> None:
        (self.port,) = free_ports(1)
        port = ["--port", "0", "--tls-port"] if tls else ["--port"]
        self._command = [SERVER, *port, str(self.port), "--bind", "127.0.0.1", "--save", "", *arguments]
        self._folder = folder
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
        while self._process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 30):
                return
        raise AssertionError(f"redis-server ended with {self._process.returncode}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def settings(self, **more: object) -> RedisSettings:
        """With time enough for a busy machine: a server that is gone is noticed at once all the same."""
        times = dict.fromkeys(("connect_timeout", "socket_timeout", "wait_timeout"), PATIENCE_MS)
        return RedisSettings("127.0.0.1", self.port, **{**times, **more})  # type: ignore[arg-type]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    running = Redis(tmp_path)
    yield running
    running.kill()


def answer(value: int = 1) -> Response:
    return Response([Tensor("OUT", "INT32", np.full((2, 2), value, np.int32))], {"p": True})


def kept(cache: RedisCache, key: bytes = KEY, value: int = 1) -> None:
    """Keep an answer, and wait until it has been sent."""
    cache.insert(key, answer(value))
    sent = threading.Event()
    for _ in range(8):  # as many as there are threads, and more: those before them are done then
        cache.run(lambda: None)
    cache.run(sent.set)
    assert sent.wait(30)
    while cache._pending:
        pass


@needs_server
def test_an_answer_is_found_by_another_server(server: Redis) -> None:
    one, other = (RedisCache(server.settings(), FakeClock().monotonic_ns) for _ in range(2))
    assert other.lookup(KEY) is None
    kept(one)
    found = other.lookup(KEY)
    assert found is not None
    assert found.outputs[0].data.tolist() == [[1, 1], [1, 1]]
    assert found.parameters == {"p": True}
    assert (other.stats().hits, other.stats().misses) == (1, 1)
    one.close()
    other.close()


@needs_server
def test_databases_are_apart(server: Redis) -> None:
    one, other = (RedisCache(server.settings(db=number), FakeClock().monotonic_ns) for number in (0, 1))
    kept(one)
    assert other.lookup(KEY) is None
    one.close()
    other.close()


@needs_server
def test_an_unreachable_redis_is_a_miss_and_is_used_again_when_it_is_back(
    server: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    cache = RedisCache(server.settings(), clock.monotonic_ns)
    kept(cache)
    server.kill()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert cache.lookup(KEY) is None
            cache.insert(KEY, answer())
    assert len(caplog.records) == 1, "one line for one failure"
    server.start()
    assert cache.lookup(KEY) is None, "it is left alone for a while"
    clock.advance(2_000_000_000)
    kept(cache, value=7)
    found = cache.lookup(KEY)
    assert found is not None
    assert found.outputs[0].data[0, 0] == 7
    cache.close()


@needs_server
@pytest.mark.parametrize(("password", "reason"), [("", "Authentication required"), ("wrong", "WRONGPASS|invalid")])
def test_wrong_credentials_stop_the_start_with_the_reason(tmp_path: Path, password: str, reason: str) -> None:
    locked = Redis(tmp_path, "--requirepass", PASSWORD)
    try:
        with pytest.raises(ConfigError, match=reason) as caught:
            RedisCache(locked.settings(password=password), FakeClock().monotonic_ns)
        assert PASSWORD not in str(caught.value)
        cache = RedisCache(locked.settings(password=PASSWORD), FakeClock().monotonic_ns)
        kept(cache)
        assert cache.lookup(KEY) is not None
        cache.close()
        cache = RedisCache(locked.settings(user="default", password=PASSWORD), FakeClock().monotonic_ns)
        assert cache.lookup(KEY) is not None
        cache.close()
    finally:
        locked.kill()


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """A certificate that vouches for itself and its key, for both sides, as settings."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    files = {"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem"), "cacert": str(tmp_path / "cert.pem")}
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", files["key"], "-out", files["cert"]]
    subprocess.run([*make.split(), *names], check=True, capture_output=True)
    return files


@needs_server
@pytest.mark.parametrize("mutual", [False, True])
def test_answers_are_kept_over_tls_where_each_side_trusts_the_other(
    tmp_path: Path, tls: dict[str, str], mutual: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own = ["--tls-cert-file", tls["cert"], "--tls-key-file", tls["key"], "--tls-ca-cert-file", tls["cacert"]]
    guarded = Redis(tmp_path, *own, "--tls-auth-clients", "yes" if mutual else "no", tls=True)
    known = tls if mutual else {"cacert": tls["cacert"]}
    unknown = {"cacert": tls["cacert"]} if mutual else {"cert": tls["cert"], "key": tls["key"]}
    try:
        cache = RedisCache(guarded.settings(**known, socket_timeout=30_000), FakeClock().monotonic_ns)
        assert not caplog.records
        kept(cache)
        assert cache.lookup(KEY) is not None
        cache.close()
        for stranger in (unknown, {}):
            caplog.clear()
            cache = RedisCache(guarded.settings(**stranger), FakeClock().monotonic_ns)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert cache.lookup(KEY) is None
            cache.close()
    finally:
        guarded.kill()


def test_files_for_tls_that_cannot_be_used_stop_the_start(tmp_path: Path, tls: dict[str, str]) -> None:
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("no certificate")
    for files, why in (
        ({"cacert": str(tmp_path / "nowhere.pem")}, "cacert cannot be used: .*No such file"),
        ({"cacert": str(no_pem)}, "cacert cannot be used"),
        ({"cert": tls["cert"]}, "cert cannot be used"),
        ({"cert": tls["cert"], "key": str(no_pem)}, "cert, key cannot be used"),
        ({"key": tls["key"]}, "redis,key needs its certificate"),
    ):
        with pytest.raises(ConfigError, match=why):
            RedisCache(RedisSettings("127.0.0.1", 1, **files), FakeClock().monotonic_ns)


@needs_server
def test_what_a_stranger_wrote_is_a_miss(server: Redis) -> None:
    cache = RedisCache(server.settings(), FakeClock().monotonic_ns)
    stranger = redis.Redis(port=server.port)
    for value in (b"", b"junk", b"rmra\x01\xff\xff\xff\xff"):
        stranger.set(b"remora:1:" + KEY, value)
        assert cache.lookup(KEY) is None
    stranger.setrange(b"remora:1:" + KEY, MAX_BYTES, b"x")
    assert cache.lookup(KEY) is None
    stranger.delete(b"remora:1:" + KEY)
    stranger.lpush(b"remora:1:" + KEY, b"a list")
    assert cache.lookup(KEY) is None
    stranger.close()
    cache.close()


def test_a_server_that_is_not_there_is_warned_of_and_every_lookup_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    with caplog.at_level(logging.WARNING):
        cache = RedisCache(RedisSettings("127.0.0.1", port, password=PASSWORD), FakeClock().monotonic_ns)
    assert f"redis at 127.0.0.1:{port} does not answer" in caplog.text
    assert PASSWORD not in caplog.text
    assert cache.lookup(KEY) is None
    cache.insert(KEY, answer())
    cache.close()
    cache.insert(KEY, answer())
    done = threading.Event()
    cache.run(done.set)
    assert done.is_set(), "work is done after the end, too"


def test_a_server_that_never_answers_delays_requests_at_most_by_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = RedisSettings("127.0.0.1", int(silent.getsockname()[1]), socket_timeout=50)
        clock = FakeClock()
        cache = RedisCache(settings, clock.monotonic_ns)  # the greeting times out: else this test hangs
        assert cache.lookup(KEY) is None
        clock.advance(2_000_000_000)
        assert cache.lookup(KEY) is None
        cache.close()


# -- settings -------------------------------------------------------------------------------------------------------


def test_an_answer_for_a_cache_that_is_being_closed_takes_none_of_the_memory_for_answers_in_flight() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    cache = RedisCache(RedisSettings("127.0.0.1", port), itertools.count(0, 2_000_000_000).__next__)
    cache.close()
    cache.insert(KEY, answer())
    assert cache.pending_bytes == 0


def test_settings_have_tritons_names() -> None:
    given = {"host": "h", "port": "6380", "user": "u", "password": "p", "db": "3", "connect_timeout": "20"}
    assert RedisSettings.of(given) == RedisSettings("h", 6380, "u", "p", 3, 20)
    assert RedisSettings.of({**given, "socket_timeout": "0"}).socket_timeout == RedisSettings("h", 1).socket_timeout


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "needs host and port"),
        ({"host": "h"}, "needs port"),
        ({"host": "h", "port": "x"}, "redis,port: expected a whole number"),
        ({"host": "h", "port": "1", "ttl": "1"}, "redis,ttl: there is no such setting"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RedisSettings.of(given)


def test_a_refusal_never_repeats_a_password() -> None:
    with pytest.raises(ValueError, match="no such setting") as caught:
        RedisSettings.of({"host": "h", "port": "1", "passwort": "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_credentials_come_from_the_environment_where_the_flags_give_none() -> None:
    environ = {"TRITONCACHE_REDIS_USERNAME": "u", "TRITONCACHE_REDIS_PASSWORD": "p"}
    address = ("redis,host=h", "redis,port=1")
    assert with_secrets(EngineOptions(cache_config=address), environ).cache_config == (
        *address,
        "redis,user=u",
        "redis,password=p",
    )
    own = (*address, "redis,password=own")
    assert with_secrets(EngineOptions(cache_config=own), environ).cache_config == (*own, "redis,user=u")
    for options in (EngineOptions(), EngineOptions(cache_config=("local,size=1",))):
        assert with_secrets(options, environ) == options


# -- an engine on it ------------------------------------------------------------------------------------------------


@needs_server
def test_two_engines_share_answers_until_the_model_changes(
    server: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", backend.find)
    write_model(tmp_path / "models", "m", config=DOUBLER + "response_cache { enable: true }")
    times = (f"redis,{name}={PATIENCE_MS}" for name in ("connect_timeout", "socket_timeout", "wait_timeout"))
    options = EngineOptions(cache_config=("redis,host=127.0.0.1", f"redis,port={server.port}", *times))

    def hits_of(value: int) -> tuple[int, int]:
        with Engine(tmp_path / "models", options=options) as engine:
            assert engine.infer("m", {"IN": [[value]]})["OUT"].tolist() == [[2 * value]]
            (stats,) = engine.perform(ModelStatistics("m"))
            page = page_text(MetricsExporter(MetricsSettings(), FakeClock(), engine._cache).families(engine.models()))
            assert f'nv_cache_num_hits_per_model{{model="m",version="1"}} {stats.cache_hit.count}' in page
            return stats.cache_hit.count, stats.cache_miss.count

    assert hits_of(3) == (0, 1)
    assert hits_of(3) == (1, 0)
    assert hits_of(4) == (0, 1)
    (tmp_path / "models" / "m" / "1" / "fake.bin").write_bytes(b"other weights")
    assert hits_of(3) == (0, 1)


class Replies:
    """Client of a server whose reply to every command is the same, or an error."""

    connection_pool = None

    def __init__(self, reply: object) -> None:
        self.reply = reply
        self.commands = 0

    def _answer(self, *_: object) -> object:
        self.commands += 1
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    strlen = get = set = _answer


def over(client: Replies) -> tuple[RedisCache, FakeClock]:
    """A cache over such a client, which no server has refused yet."""
    (port,) = free_ports(1)
    clock = FakeClock()
    cache = RedisCache(RedisSettings("127.0.0.1", port), clock.monotonic_ns)
    clock.advance(2_000_000_000)
    cache._client = client  # type: ignore[assignment]
    return cache, clock


@pytest.mark.parametrize("reply", [b"OK", "PONG", None, [1], {}, 1.5, RuntimeError("?"), IndexError(), KeyError("x")])
def test_whatever_the_library_returns_or_raises_a_request_misses_and_redis_rests(reply: object) -> None:
    client = Replies(reply)
    cache, _ = over(client)
    assert cache.lookup(KEY) is None
    assert cache.lookup(KEY) is None
    assert client.commands == 1, "the second look-up asks nothing"
    cache._threads.shutdown()


@pytest.mark.parametrize("value", ["text", 7, [b"a"]])
def test_a_value_that_is_not_bytes_is_a_miss(value: object) -> None:
    client = Replies(value)
    client.strlen = lambda _key: 3  # type: ignore[method-assign]
    cache, _ = over(client)
    assert cache.lookup(KEY) is None
    cache._threads.shutdown()


def test_an_insertion_that_fails_in_an_unknown_way_counts_its_bytes_no_more() -> None:
    cache, _ = over(Replies(RuntimeError("?")))
    kept(cache)
    assert cache.pending_bytes == 0
    cache._threads.shutdown()


def test_a_key_of_another_type_leaves_the_cache_on_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    wrong = redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    client = Replies(wrong)
    cache, clock = over(client)
    caplog.clear()
    for _ in range(3):
        assert cache.lookup(KEY) is None
    assert client.commands == 3
    assert len(caplog.records) == 1, "once a minute"
    clock.advance(61_000_000_000)
    cache.lookup(KEY)
    assert len(caplog.records) == 2
    cache._threads.shutdown()
