"""Emulator of an Azure ML online deployment, with its mount, probes, limits and shutdown.

Limits are those of the documentation of online endpoints (probes every 10 s with a timeout of 2 s, requests of 5 s
unless configured otherwise, admission of twice the concurrency) and of azureml-inference-server-http.
"""

from __future__ import annotations

from pathlib import Path

from remora_deploy.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe
from remora_deploy.emulate import container as any_container
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.examples import v2_request
from remora_deploy.emulate.generation import generation_checks
from remora_deploy.emulate.stage import Stage

GRACE_S = 30.0
REQUEST_S = 5.0
CONCURRENCY = 8
_NAME = "emulated"


def launch(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """Return the container's environment, with the mount of the model's version."""
    mounted = mounts / _NAME / "1"
    mounted.parent.mkdir(parents=True)
    if settings.model is not None:
        mounted.symlink_to(settings.model)
    else:
        mounted.mkdir()
    environ = {"AZUREML_MODEL_DIR": str(mounted), "SERVER_PORT": str(port), "AML_APP_ROOT": str(mounts)}
    return Launch((), environ, port)


def path(stage: Stage) -> str:
    """Return the scoring route."""
    return stage.settings.given.get("scoring-route", "/score")


def call(stage: Stage, **headers: str) -> HttpReply:
    """Send a request as the endpoint forwards it."""
    sent = {"Content-Type": stage.settings.content_type, **headers}
    return stage.ask("POST", path(stage), stage.body, sent)


def lives_while_it_loads(stage: Stage) -> None:
    live = stage.settings.given.get("liveness-route", "/livez")
    if live == stage.platform.probe.path:
        raise Failed(f"liveness and readiness are the same route, {live}")
    any_container.must_answer(stage.ask("GET", live, timeout_s=stage.probe_s), f"GET {live}")


def keeps_request_ids(stage: Stage) -> None:
    answer = any_container.must_answer(call(stage, **{"x-ms-client-request-id": "abc"}), "a request with an id")
    if answer.headers.get("x-ms-client-request-id") != "abc" or not answer.headers.get("x-request-id"):
        raise Failed("the answer has no x-request-id, or not the client's x-ms-client-request-id")


def refuses_long_ids(stage: Stage) -> None:
    answer = call(stage, **{"x-request-id": "r" * 101})
    if answer.status != 431:
        raise Failed(f"an x-request-id of 101 characters got {answer.shown}")


PLATFORM = Platform(
    title="azureml",
    launch=launch,
    probe=Probe("/readyz", 2.0, 10.0, 300.0),
    grace_s=GRACE_S,
    example=v2_request,
    checks=(
        Check("starts", "the process answers its probes", "a deployment fails with 502s", any_container.starts, True),
        Check(
            "ready",
            "the readiness route answers 200 within 300 s",
            "30 failed probes, 10 s apart, end a deployment's creation",
            any_container.becomes_ready,
            True,
        ),
        Check(
            "probe-time",
            "every probe is answered within 2 s, even while models load",
            "a probe that takes longer counts as failed",
            any_container.probes_in_time,
            True,
        ),
        Check(
            "liveness",
            "liveness has a separate route",
            "one route for both restarts a slowly loading deployment forever",
            lives_while_it_loads,
        ),
        Check(
            "port",
            "it listens on SERVER_PORT, on all interfaces",
            "the routes of the environment name a port",
            any_container.listens_on_given_port("SERVER_PORT"),
        ),
        Check(
            "scoring",
            "the scoring route answers within 5 s",
            "request_timeout_ms is 5000 unless set, and a longer request gets a 408",
            any_container.answers(call, REQUEST_S),
        ),
        Check(
            "request-ids",
            "request ids are returned",
            "they identify a request in the logs",
            keeps_request_ids,
        ),
        Check("long-ids", "ids of more than 100 characters get a 431", "Azure's server refuses them", refuses_long_ids),
        Check(
            "bad-body",
            "an invalid body gets an error in JSON",
            "clients see a 424 with the code in a header: only the body has the reason",
            any_container.refuses(path, "error", "message"),  # the second is the key of Azure's own server
        ),
        Check(
            "concurrency",
            "all admitted requests and the probes are answered",
            "twice max_concurrent_requests_per_instance are admitted, the rest get a 429",
            any_container.admits(call, 2 * CONCURRENCY, 4 * CONCURRENCY),
        ),
        *generation_checks(path),
        Check(
            "model-read-only",
            "the model's mount is not modified",
            "the mount is read-only",
            any_container.leaves_the_model_alone,
        ),
        Check(
            "sigterm-exit",
            "it exits with status 0 within 30 s of SIGTERM",
            "Kubernetes then sends SIGKILL",
            any_container.ends_in_time,
        ),
    ),
)
