"""Emulator of Google Cloud Run, with its port, startup, concurrency and shutdown.

Limits are those of the container contract: 240 s until the port is open, 80 concurrent requests, 300 s per request. The
container's variables are Knative's.
"""

from __future__ import annotations

from remora_deploy.emulate import Check, Platform, Probe
from remora_deploy.emulate import container as any_container
from remora_deploy.emulate.examples import v2_request
from remora_deploy.emulate.generation import generation_checks
from remora_deploy.emulate.knative import (
    ANSWERS,
    CHATS,
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
    example=v2_request,
    checks=(
        Check("starts", "the process opens its port", "the revision never serves", any_container.starts, True),
        Check(
            "ready",
            "the port is open within 240 s",
            "the startup probe (TCP by default) then fails",
            any_container.becomes_ready,
            True,
        ),
        Check(
            "port",
            "it listens on $PORT, on all interfaces",
            "the platform calls no other port",
            any_container.listens_on_given_port("PORT"),
        ),
        Check(
            "first-request",
            "the first request after the port opened is answered",
            "the platform waits only for an open port",
            is_ready_when_it_listens,
        ),
        ANSWERS,
        Check(
            "grpc",
            "gRPC is answered on the single port if its name is h2c",
            "HTTP/2 is forwarded unchanged",
            speaks_grpc,
        ),
        Check(
            "concurrency",
            "the maximum of concurrent requests is answered",
            "an instance gets up to 80 by default",
            any_container.admits(call, CONCURRENCY, 2 * CONCURRENCY),
        ),
        REFUSES,
        *generation_checks(lambda _: CHATS),
        Check("writes", "only /tmp is written", "files use the instance's memory", writes_only_to_tmp),
        Check(
            "sigterm-exit",
            "it exits with status 0 within 10 s of SIGTERM",
            "SIGKILL follows",
            any_container.ends_in_time,
        ),
    ),
)
