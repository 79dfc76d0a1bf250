"""Probes: 200 or 503 at once, and what is waited for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from remora.engine import Engine
from remora.models.readiness import Readiness
from remora.protocols.http1 import Head
from remora.server.http.probes import probe

STARTING = Readiness(False, False, False, ("the models of the start are being loaded",))
READY = Readiness(True, True, False, ())
BROKEN = Readiness(False, True, False, ("model 'x' version 1 is UNAVAILABLE: Internal: no",))
DRAINING = Readiness(False, True, True, ("the server is draining",))

LOST = Readiness(False, True, False, ("model 'x' version 1: the GPU is lost; restart the server",), live=False)


class FakeEngine:
    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    def readiness(self) -> Readiness:
        return self._readiness


def asked(path: str, readiness: Readiness) -> tuple[int, str]:
    answer = probe(Head("GET", path, ()), cast(Engine, cast(Any, FakeEngine(readiness))))
    return answer.status, b"".join(map(bytes, answer.body)).decode()


@pytest.mark.parametrize(
    ("readiness", "live", "started", "ready"),
    [
        (STARTING, 200, 503, 503),
        (READY, 200, 200, 200),
        (BROKEN, 200, 200, 503),
        (DRAINING, 200, 200, 503),
        (LOST, 503, 200, 503),
    ],
)
def test_each_probe_has_its_status(readiness: Readiness, live: int, started: int, ready: int) -> None:
    assert [asked(path, readiness)[0] for path in ("/livez", "/startupz", "/readyz")] == [live, started, ready]


def test_the_awaited_loads_are_reported() -> None:
    assert asked("/readyz", BROKEN) == (503, "not yet\n")
    assert (
        asked("/readyz?verbose", BROKEN)[1] == "not yet\nwaits for: model 'x' version 1 is UNAVAILABLE: Internal: no\n"
    )
    assert asked("/readyz?verbose", READY) == (200, "ok\n")


@pytest.mark.parametrize(
    ("readiness", "healthy", "live", "ready"),
    [
        (STARTING, 503, 200, 503),
        (READY, 200, 200, 200),
        (BROKEN, 200, 200, 503),
        (DRAINING, 200, 200, 503),
        (LOST, 503, 503, 503),
    ],
)
def test_the_paths_of_other_servers_mean_what_their_manifests_ask(
    readiness: Readiness, healthy: int, live: int, ready: int
) -> None:
    found = [asked(path, readiness)[0] for path in ("/health", "/health/live", "/health/ready")]
    assert found == [healthy, live, ready]
