"""Google Cloud Run: the port it names, requests from the moment that the port is open, and ten seconds for the end.

Figures are those of the container contract: 240 s until the port is open, 80 requests at a time, a request's 300 s.
The container's variables are Knative's.
"""

from __future__ import annotations

from remora_adapters.emulate import Check, Platform, Probe
from remora_adapters.emulate import container as any_container
from remora_adapters.emulate.knative import (
    ANSWERS,
    REFUSES,
    call,
    is_ready_when_it_listens,
    launch,
    speaks_grpc,
    writes_only_to_tmp,
)

GRACE_S = 10.0
CONCURRENCY = 80

PLATFORM = Platform(
    title="cloud-run",
    launch=launch,
    probe=Probe("/", 1.0, 0.1, 240.0, status=0),
    grace_s=GRACE_S,
    checks=(
        Check("starts", "the process opens its port", "the revision never serves", any_container.starts, True),
        Check(
            "ready",
            "the port is open within 240 s",
            "the startup probe, TCP unless it is set, gives up then",
            any_container.becomes_ready,
            True,
        ),
        Check(
            "port",
            "it listens on $PORT, on all interfaces",
            "no other port is reached",
            any_container.listens_where_told("PORT"),
        ),
        Check(
            "first-request",
            "the first request after the port was open is answered",
            "an open port is all that the platform waits for",
            is_ready_when_it_listens,
        ),
        ANSWERS,
        Check(
            "grpc",
            "gRPC is answered on the one port, where it is named h2c",
            "HTTP/2 is passed on as it comes",
            speaks_grpc,
        ),
        Check(
            "concurrency",
            "as many requests at a time as an instance gets are answered",
            "80 at a time are sent unless the service says otherwise",
            any_container.admits(call, CONCURRENCY, 2 * CONCURRENCY),
        ),
        REFUSES,
        Check("writes", "nothing is written but below /tmp", "every file is memory", writes_only_to_tmp),
        Check(
            "sigterm-exit",
            "it ends with status 0 within 10 s of SIGTERM",
            "SIGKILL follows",
            any_container.ends_in_time,
        ),
    ),
)
