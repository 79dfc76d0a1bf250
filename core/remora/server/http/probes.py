"""Kubernetes probes at /livez, /startupz and /readyz, and at the paths of other servers.

``/health`` is vLLM's: 200 from the end of the start on, while the process works. Its manifests ask there whether a
container is alive, which a draining server or one with a broken model is. A platform's own route with the same path
goes first.

Probes answer 200 or 503 as soon as the port is open; V2's health routes keep Triton's statuses. With ``?verbose`` the
answer lists the reasons for "not yet", one per line.

Invariant: no probe blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from remora.engine import Engine
from remora.models.readiness import Readiness
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer

_MEANING: Mapping[str, Callable[[Readiness], bool]] = {
    "/livez": lambda found: found.live,
    "/startupz": lambda found: found.started,
    "/readyz": lambda found: found.ready,
    "/health": lambda found: found.live and found.started,
    "/health/live": lambda found: found.live,
    "/health/ready": lambda found: found.ready,
}
PATHS = frozenset(_MEANING)
_HEADERS = ((b"Content-Type", b"text/plain; charset=utf-8"), (b"Cache-Control", b"no-store"))


def probe(head: Head, engine: Engine) -> HttpAnswer:
    """Return the answer to a GET or HEAD of one of `PATHS`."""
    readiness = engine.readiness()
    good = _MEANING[head.path](readiness)
    lines = ["ok" if good else "not yet"]
    if head.query.partition("=")[0] == "verbose":
        lines += [f"waits for: {each}" for each in readiness.waits_for]
    return HttpAnswer(200 if good else 503, _HEADERS, ["".join(f"{line}\n" for line in lines).encode()])
