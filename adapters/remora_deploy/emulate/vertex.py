"""Emulator of Vertex AI online prediction, with its routes, predict format and redirects.

Limits are those of the custom container requirements; the rule for redirects is that of Triton's Vertex front end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remora_deploy.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe
from remora_deploy.emulate import container as any_container
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.examples import predict_request
from remora_deploy.emulate.generation import generation_checks
from remora_deploy.emulate.stage import Stage

GRACE_S = 30.0
HEALTH, PREDICT = "/emulated/health", "/emulated/models/1:predict"
_REQUEST_S = 60.0
_CHANGING = (
    "v2/repository/models/emulated/load",
    "v2/repository/models/emulated/unload",
    "v2/systemsharedmemory/region/emulated/register",
    "v2/cudasharedmemory/unregister",
    "v2/logging",
)


def launch(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """Return the AIP variables, with unusual routes."""
    environ = {
        "AIP_MODE": "PREDICTION",
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": HEALTH,
        "AIP_PREDICT_ROUTE": PREDICT,
        "AIP_ENDPOINT_ID": "1",
        "AIP_DEPLOYED_MODEL_ID": "1",
    }
    if settings.model is not None:
        environ["AIP_STORAGE_URI"] = str(settings.model)
    return Launch((), environ, port)


def path(stage: Stage) -> str:
    return PREDICT


def call(stage: Stage) -> HttpReply:
    """Send a predict request."""
    return stage.ask("POST", PREDICT, stage.body, {"Content-Type": stage.settings.content_type})


def metrics(stage: Stage) -> HttpReply:
    """Return the metrics, which clients reach by a redirect."""
    return stage.ask("POST", PREDICT, b"{}", {"X-Vertex-Ai-Triton-Redirect": "metrics"})


def as_instance(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat as the instance of a predict request."""
    return {"instances": [{"@requestFormat": "chatCompletions", **chat}]}


def predicts_an_object(stage: Stage) -> None:
    instances = any_container.instances(stage)
    answer = any_container.must_answer(call(stage), "a prediction")
    predictions = any_container.json_object(answer).get("predictions")
    if not isinstance(predictions, list) or len(predictions) != len(instances):
        raise Failed(f'{len(instances)} instances got no {{"predictions": [...]}} of that length: {answer.shown}')


def changes_nothing_by_redirect(stage: Stage) -> None:
    for target in _CHANGING:
        headers = {"X-Vertex-Ai-Triton-Redirect": target, "Content-Type": "application/json"}
        answer = stage.ask("POST", PREDICT, b"{}", headers)
        if 200 <= answer.status < 300:
            raise Failed(f"a redirect to {target} got {answer.shown}")
    any_container.must_answer(call(stage), "a request after redirects that were refused")


PLATFORM = Platform(
    title="vertex",
    launch=launch,
    probe=Probe(HEALTH, 10.0, 10.0, 300.0),
    grace_s=GRACE_S,
    example=predict_request,
    checks=(
        Check("starts", "the process answers its probes", "four failed probes restart it", any_container.starts, True),
        Check("ready", "AIP_HEALTH_ROUTE answers 200", "the deployment fails", any_container.becomes_ready, True),
        Check(
            "port",
            "it listens on AIP_HTTP_PORT, on all interfaces",
            "the platform calls no other port",
            any_container.listens_on_given_port("AIP_HTTP_PORT"),
        ),
        Check(
            "predict",
            "AIP_PREDICT_ROUTE answers",
            "clients reach only this route",
            any_container.answers(call, _REQUEST_S),
        ),
        Check(
            "predictions",
            'the answer is {"predictions": [...]}, one per instance',
            "the platform refuses a bare list",
            predicts_an_object,
        ),
        Check(
            "redirects",
            "redirects neither load, unload, register nor set",
            "permission to predict must not include unloading a model",
            changes_nothing_by_redirect,
        ),
        Check(
            "bad-body",
            "an invalid body gets an error in JSON",
            "clients see the error unchanged",
            any_container.refuses(path, "error"),
        ),
        Check(
            "load",
            "concurrent requests and health probes are answered",
            "a container that fails its health checks under load is replaced",
            any_container.admits(call, 16, 64),
        ),
        *generation_checks(path, metrics=metrics, wrap=as_instance),
        Check(
            "model-read-only",
            "the model's folder is not modified",
            "the folder may be a read-only mount",
            any_container.leaves_the_model_alone,
        ),
        Check(
            "sigterm-exit",
            "it exits with status 0 within 30 s of SIGTERM",
            "SIGKILL follows",
            any_container.ends_in_time,
        ),
    ),
)
