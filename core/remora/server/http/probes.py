"""The probes of orchestrators: /livez, /startupz and /readyz; the law: no probe waits for anything.

They answer from the moment the port is open, 200 or 503 as probes want it; V2's own health routes keep Triton's
statuses. With ``?verbose`` the answer tells what is being waited for, a line each.
"""

from __future__ import annotations

from remora.engine import Engine
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer

PATHS = frozenset(("/livez", "/startupz", "/readyz"))
_HEADERS = ((b"Content-Type", b"text/plain; charset=utf-8"), (b"Cache-Control", b"no-store"))


def probe(head: Head, engine: Engine) -> HttpAnswer:
    """The answer to a GET or HEAD of one of `PATHS`."""
    readiness = engine.readiness()
    good = {"/livez": readiness.live, "/startupz": readiness.started, "/readyz": readiness.ready}[head.path]
    lines = ["ok" if good else "not yet"]
    if head.query.partition("=")[0] == "verbose":
        lines += [f"waits for: {each}" for each in readiness.waits_for]
    return HttpAnswer(200 if good else 503, _HEADERS, ["".join(f"{line}\n" for line in lines).encode()])
