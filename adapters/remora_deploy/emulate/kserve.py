"""Emulator of KServe, with its mount, agent, batcher, V1 and V2.

Rules are those of KServe's Go agent and batcher and of its Python server and client.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

from remora_deploy.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe, Skipped
from remora_deploy.emulate import container as any_container
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.container import json_object
from remora_deploy.emulate.examples import predict_request
from remora_deploy.emulate.generation import generation_checks
from remora_deploy.emulate.stage import Stage

GRACE_S = 30.0
MODEL = "emulated"
_REQUEST_S = 60.0
_INSTANCES = 37
"""More than one batch, and not a multiple of its size."""


def launch(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """Return a runtime's arguments and environment, with the models in place."""
    models = mounts / "models"
    if settings.model is not None:
        models.symlink_to(settings.model)
    arguments = (f"--model_name={MODEL}", f"--http_port={port}", "--grpc-port=0")
    return Launch(arguments, {"REMORA_MODEL_REPOSITORY": str(models)}, port)


def name(stage: Stage) -> str:
    """Return the first model of the server. Raises Failed without one."""
    known = stage.facts.get("model")
    if known is None:
        answer = any_container.must_answer(stage.ask("GET", "/v1/models"), "GET /v1/models")
        models = json_object(answer).get("models")
        if not isinstance(models, list) or not models:
            raise Failed(f"/v1/models lists no model: {answer.shown}")
        known = stage.facts["model"] = str(models[0])
    return str(known)


def path(stage: Stage) -> str:
    return f"/v1/models/{quote(name(stage), '')}:predict"


def call(stage: Stage) -> HttpReply:
    """Send a predict request."""
    return stage.ask("POST", path(stage), stage.body, {"Content-Type": "application/json"})


def is_alive_at_its_root(stage: Stage) -> None:
    answer = any_container.must_answer(stage.ask("GET", "/"), "GET /")
    if json_object(answer).get("status") != "alive":
        raise Failed(f"/ answered {answer.shown}")


def says_whether_a_model_is_ready(stage: Stage) -> None:
    known, model = stage.ask("GET", path(stage).removesuffix(":predict")), name(stage)
    if json_object(any_container.must_answer(known, f"GET /v1/models/{model}")) != {"name": model, "ready": True}:
        raise Failed(f"/v1/models/{model} answered {known.shown}")
    unknown = stage.ask("GET", "/v1/models/there-is-no-such-model")
    if unknown.status != 404 or "error" not in json_object(unknown):
        raise Failed(f"an unknown model got {unknown.shown}")


def predicts_one_for_one(stage: Stage) -> None:
    instance = any_container.instances(stage)[0]
    single = _predictions(call_with(stage, [instance]))
    many = _predictions(call_with(stage, [instance] * _INSTANCES))
    if len(single) != 1 or len(many) != _INSTANCES:
        raise Failed(f"{_INSTANCES} instances got {len(many)} predictions")
    if any(prediction != single[0] for prediction in many):
        raise Failed("the same instance got different predictions in a larger body")


def call_with(stage: Stage, instances: list[object]) -> HttpReply:
    """Send a request as the batcher does, with instances only and without the client's headers."""
    return stage.ask("POST", path(stage), json.dumps({"instances": instances}).encode())


def answers_events_with_events(stage: Stage) -> None:
    event = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "emulator", "ce-type": "request"}
    answer = stage.ask("POST", path(stage), stage.body, {"Content-Type": "application/json", **event})
    any_container.must_answer(answer, "a CloudEvent")
    if not all(answer.headers.get(header) for header in ("ce-id", "ce-type", "ce-source", "ce-specversion")):
        raise Failed("a CloudEvent was not answered by one")


def says_health_in_json(stage: Stage) -> None:
    for state in ("live", "ready"):
        answer = any_container.must_answer(stage.ask("GET", f"/v2/health/{state}"), f"GET /v2/health/{state}")
        if json_object(answer).get(state) is not True:
            raise Failed(f"/v2/health/{state} answered {answer.shown}")


def loads_with_an_empty_body(stage: Stage) -> None:
    if "agent-model" not in stage.settings.given:
        raise Skipped("needs a server that loads on demand: --with agent-model=NAME")
    model = stage.settings.given["agent-model"]
    for verb in ("load", "unload", "load"):
        any_container.must_answer(
            stage.ask("POST", f"/v2/repository/models/{quote(model, '')}/{verb}", b""), f"{verb} {model}"
        )


def _predictions(answer: HttpReply) -> list[object]:
    found = json_object(any_container.must_answer(answer, "a prediction")).get("predictions")
    if not isinstance(found, list):
        raise Failed(f"no predictions: {answer.shown}")
    return found


PLATFORM = Platform(
    title="kserve",
    launch=launch,
    probe=Probe("/v2/health/ready", 2.0, 2.0, 300.0),
    grace_s=GRACE_S,
    example=predict_request,
    checks=(
        Check("starts", "the process answers its probes", "the pod restarts forever", any_container.starts, True),
        Check(
            "ready",
            "the server becomes ready",
            "else the service never is",
            any_container.becomes_ready,
            True,
        ),
        Check(
            "port",
            "it listens on the port of its arguments, on all interfaces",
            "the agent calls 8080",
            any_container.listens_on_given_port("--http_port"),
        ),
        Check("v1-alive", 'GET / answers {"status": "alive"}', "this is V1's liveness route", is_alive_at_its_root),
        Check(
            "v1-ready",
            "a model reports its readiness, and an unknown one gets a 404",
            "KServe's client and transformers check this before they send",
            says_whether_a_model_is_ready,
        ),
        Check(
            "predict",
            "predict requests are answered",
            "V1 requires it",
            any_container.answers(call, _REQUEST_S),
        ),
        Check(
            "one-for-one",
            "there are as many predictions as instances, in order, also without headers",
            "the batcher joins requests and splits the answer by count; another count fails all of them",
            predicts_one_for_one,
        ),
        Check(
            "cloud-events",
            "an event is answered by an event",
            "brokers and sources send them",
            answers_events_with_events,
        ),
        Check("v2-health", "V2's health has JSON bodies", "KServe's client reads them", says_health_in_json),
        Check(
            "bad-body",
            'an invalid body gets {"error": ...}',
            "KServe's clients read it",
            any_container.refuses(path, "error"),
        ),
        Check(
            "agent",
            "load and unload work with empty bodies",
            "the agent of multi-model serving sends none",
            loads_with_an_empty_body,
        ),
        *generation_checks(lambda _: "/openai/v1/chat/completions"),
        Check(
            "model-read-only",
            "/mnt/models is not modified",
            "the mount is read-only",
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
