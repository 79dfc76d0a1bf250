"""Emulator of Knative Serving, with its port, probes, queue proxy and traffic after SIGTERM.

Limits are those of the runtime contract and of the queue proxy, which probes many times a second until the first
success, admits containerConcurrency requests, queues ten times as many, and still forwards requests after SIGTERM.
"""

from __future__ import annotations

from pathlib import Path

from remora_deploy.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe, Skipped, grpc_health
from remora_deploy.emulate import container as any_container
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.examples import only_model, v2_request
from remora_deploy.emulate.generation import generation_checks
from remora_deploy.emulate.stage import Stage

GRACE_S = 300.0
SERVES_ON_S = 4.0
CONCURRENCY = 8
CHATS = "/v1/chat/completions"
_REQUEST_S = 300.0
_GRPC_S = 10.0


def launch(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """Return the platform's environment, in which only the temporary folder is writable."""
    scratch = mounts / "tmp"
    scratch.mkdir()
    environ = {
        "PORT": str(port),
        "K_SERVICE": "emulated",
        "K_REVISION": "emulated-00001",
        "K_CONFIGURATION": "emulated",
        "TMPDIR": str(scratch),
        "HOME": str(mounts / "no-home"),
    }
    if settings.model is not None:
        environ["REMORA_MODEL_REPOSITORY"] = str(settings.model)
    return Launch((), environ, port)


def path(stage: Stage) -> str:
    """Return the path of the user's request, or of the only model. Raises Skipped without one."""
    found = stage.settings.given.get("path") or only_model(stage).path
    if not found:
        raise Skipped("needs the path of the request: --with path=PATH")
    return found


def call(stage: Stage) -> HttpReply:
    """Send a request as the ingress and the queue proxy forward it."""
    forwarded = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "http", "Forwarded": "for=192.0.2.1;proto=http"}
    return stage.ask("POST", path(stage), stage.body, {"Content-Type": stage.settings.content_type, **forwarded})


def probes_are_cheap(stage: Stage) -> None:
    headers = {"User-Agent": "kube-probe/1.32", "K-Kubelet-Probe": "queue"}
    slow = 0.0
    for _ in range(100):
        answer = stage.ask("GET", stage.platform.probe.path, headers=headers, timeout_s=stage.probe_s)
        any_container.must_answer(answer, "a probe of the queue proxy")
        slow = max(slow, answer.total_s)
    if slow > stage.probe_s:
        raise Failed(f"a probe took {slow:.2f} s")


def is_ready_when_it_listens(stage: Stage) -> None:
    """The first request after the port opened succeeds."""
    answer = call(stage)
    if not 200 <= answer.status < 300:
        raise Failed(f"the first request: {answer.shown}")


def has_its_metrics_there(stage: Stage) -> None:
    answer = stage.ask("GET", "/metrics")
    if answer.status != 200 or b"# TYPE" not in answer.body:
        raise Failed(f"/metrics on the single port: {answer.shown}")


def speaks_grpc(stage: Stage) -> None:
    """gRPC works on the single port beside HTTP/1.1, because probes always use HTTP/1.1."""
    if stage.settings.given.get("port-name") != "h2c":
        raise Skipped("needs a port for gRPC: --with port-name=h2c")
    if trouble := grpc_health.check(stage.address, _GRPC_S):
        raise Failed(f"grpc.health.v1.Health/Check over HTTP/2 with prior knowledge: {trouble}")
    answer = stage.ask("GET", stage.platform.probe.path)
    if not stage.platform.probe.passes(answer.status):
        raise Failed(f"a probe over HTTP/1.1 afterwards: {answer.shown}")


def writes_only_to_tmp(stage: Stage) -> None:
    """It writes neither to a missing home directory nor to the model's folder."""
    if Path(stage.launch.environ["HOME"]).exists():
        created = sorted(path.name for path in Path(stage.launch.environ["HOME"]).rglob("*"))
        raise Failed(f"it created its home directory with {created[:5]}: only /tmp is guaranteed to be writable")
    any_container.leaves_the_model_alone(stage)


ANSWERS = Check(
    "requests", "requests are answered", "the route points to this service", any_container.answers(call, _REQUEST_S)
)
REFUSES = Check(
    "bad-body",
    "an invalid body gets an error in JSON",
    "clients see the container's answer",
    any_container.refuses(path, "error"),
)
PLATFORM = Platform(
    title="knative",
    launch=launch,
    probe=Probe("/v2/health/ready", 1.0, 0.025, 600.0),
    grace_s=GRACE_S,
    example=v2_request,
    checks=(
        Check(
            "starts", "the process answers its probes", "the revision never becomes ready", any_container.starts, True
        ),
        Check(
            "ready",
            "the readiness probe answers 200 within the progress deadline",
            "a revision that is not ready within 600 s has failed",
            any_container.becomes_ready,
            True,
        ),
        Check(
            "probe-time",
            "every probe is answered within a second, even while models load",
            "the queue proxy probes many times a second",
            any_container.probes_in_time,
            True,
        ),
        Check(
            "port",
            "it listens on $PORT, on all interfaces",
            "the platform calls no other port",
            any_container.listens_on_given_port("PORT"),
        ),
        Check(
            "one-port",
            "no other port is open",
            "a revision may have one port; others are unreachable",
            any_container.has_one_port,
        ),
        Check(
            "first-request",
            "the first request after the first successful probe is answered",
            "the activator forwards queued requests as soon as a probe succeeds",
            is_ready_when_it_listens,
        ),
        ANSWERS,
        Check("probes", "probes stay fast and successful", "they continue for the pod's lifetime", probes_are_cheap),
        Check(
            "metrics",
            "metrics are on the single port",
            "9090 and 9091 are taken",
            has_its_metrics_there,
        ),
        Check(
            "grpc",
            "gRPC is answered on the single port if its name is h2c",
            "gateways then send everything as HTTP/2 with prior knowledge, and probes still use HTTP/1.1",
            speaks_grpc,
        ),
        Check(
            "admission",
            "all requests at eleven times containerConcurrency are answered",
            "the proxy queues ten times as many as it admits, and refuses the rest itself",
            any_container.admits(call, CONCURRENCY, 11 * CONCURRENCY),
        ),
        REFUSES,
        *generation_checks(lambda _: CHATS),
        Check("writes", "only /tmp is written", "only /tmp is guaranteed to be writable", writes_only_to_tmp),
        Check(
            "sigterm-serves-on",
            "requests are answered for some seconds after SIGTERM",
            "routers learn of a shutdown late, and the queue proxy still forwards their requests",
            any_container.serves_on(call, SERVES_ON_S),
        ),
        Check(
            "sigterm-exit",
            "it exits with status 0 within its grace period",
            "SIGKILL follows after timeoutSeconds",
            any_container.ends_in_time,
        ),
    ),
)
