"""Kubernetes probes at /livez, /startupz and /readyz.

They answer 200 or 503 as soon as the port is open; V2's health routes keep Triton's statuses. With ``?verbose`` the
answer lists the reasons for "not yet", one per line.

Invariant: no probe blocks.
"""

from __future__ import annotations

from remora.engine import Engine
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer

PATHS = frozenset(("/livez", "/startupz", "/readyz"))
_HEADERS = ((b"Content-Type", b"text/plain; charset=utf-8"), (b"Cache-Control", b"no-store"))


def probe(head: Head, engine: Engine) -> HttpAnswer:
    """Return the answer to a GET or HEAD of one of `PATHS`."""
    readiness = engine.readiness()
    good = {"/livez": readiness.live, "/startupz": readiness.started, "/readyz": readiness.ready}[head.path]
    lines = ["ok" if good else "not yet"]
    if head.query.partition("=")[0] == "verbose":
        lines += [f"waits for: {each}" for each in readiness.waits_for]
    return HttpAnswer(200 if good else 503, _HEADERS, ["".join(f"{line}\n" for line in lines).encode()])
