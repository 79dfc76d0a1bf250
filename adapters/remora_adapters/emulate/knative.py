"""Knative Serving: the port it names, its impatient probes, the queue proxy's admission, and traffic after SIGTERM.

Figures are those of the runtime contract and of the queue proxy: it probes many times a second until the first good
answer, admits containerConcurrency requests and queues ten times as many, and goes on sending after SIGTERM.
"""

from __future__ import annotations

from pathlib import Path

from remora_adapters.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe, Skipped, grpc_health
from remora_adapters.emulate import container as any_container
from remora_adapters.emulate.asking import HttpReply
from remora_adapters.emulate.stage import Stage

GRACE_S = 300.0
SERVES_ON_S = 4.0
CONCURRENCY = 8
_REQUEST_S = 300.0
_GRPC_S = 10.0


def launch(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """The platform's variables; nothing but the temporary folder may be written."""
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
    """Where the request goes: a service's paths are its own. Raises Skipped when it was not said."""
    if "path" not in stage.settings.given:
        raise Skipped("needs the path that the request goes to: --with path=PATH")
    return stage.settings.given["path"]


def call(stage: Stage) -> HttpReply:
    """A request as it comes through the ingress and the queue proxy."""
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
    """The first request after the port was open; on a URL there is no start to look at."""
    answer = call(stage)
    if not 200 <= answer.status < 300:
        raise Failed(f"the first request: {answer.shown}")


def has_its_metrics_there(stage: Stage) -> None:
    answer = stage.ask("GET", "/metrics")
    if answer.status != 200 or b"# TYPE" not in answer.body:
        raise Failed(f"/metrics on the one port: {answer.shown}")


def speaks_grpc(stage: Stage) -> None:
    """On the one port, beside HTTP/1.1: what gateways send is the port's name, but probes are always HTTP/1.1."""
    if stage.settings.given.get("port-name") != "h2c":
        raise Skipped("needs a port for gRPC: --with port-name=h2c")
    if trouble := grpc_health.check(stage.address, _GRPC_S):
        raise Failed(f"grpc.health.v1.Health/Check over HTTP/2 with prior knowledge: {trouble}")
    answer = stage.ask("GET", stage.platform.probe.path)
    if not stage.platform.probe.passes(answer.status):
        raise Failed(f"a probe over HTTP/1.1 afterwards: {answer.shown}")


def writes_only_to_tmp(stage: Stage) -> None:
    """What can be seen of it: its home, which is not there, and the model's folder."""
    if Path(stage.launch.environ["HOME"]).exists():
        made = sorted(path.name for path in Path(stage.launch.environ["HOME"]).rglob("*"))
        raise Failed(f"it made its home, and in it {made[:5]}: only /tmp is sure to be writable")
    any_container.leaves_the_model_alone(stage)


ANSWERS = Check("requests", "requests are answered", "the route leads here", any_container.answers(call, _REQUEST_S))
REFUSES = Check(
    "bad-body",
    "a body that cannot be read is an error in JSON",
    "clients see what the container says",
    any_container.refuses(path, "error"),
)
PLATFORM = Platform(
    title="knative",
    launch=launch,
    probe=Probe("/v2/health/ready", 1.0, 0.025, 600.0),
    grace_s=GRACE_S,
    checks=(
        Check(
            "starts", "the process answers its probes", "the revision never becomes ready", any_container.starts, True
        ),
        Check(
            "ready",
            "the readiness probe says 200 within the progress deadline",
            "a revision that is not ready within 600 s has failed",
            any_container.becomes_ready,
            True,
        ),
        Check(
            "probe-time",
            "every probe is answered within a second, also while models load",
            "the queue proxy asks many times a second",
            any_container.probes_in_time,
            True,
        ),
        Check(
            "port",
            "it listens on $PORT, on all interfaces",
            "no other port is reached",
            any_container.listens_where_told("PORT"),
        ),
        Check(
            "one-port",
            "nothing else listens",
            "a revision may have one port: what is on others is never reached",
            any_container.has_one_port,
        ),
        Check(
            "first-request",
            "the first request after the first good probe is answered",
            "the activator sends what it held as soon as a probe is good",
            is_ready_when_it_listens,
        ),
        ANSWERS,
        Check("probes", "probes stay quick and good", "they never stop", probes_are_cheap),
        Check("metrics", "metrics are on the one port", "9090 and 9091 are the queue proxy's", has_its_metrics_there),
        Check(
            "grpc",
            "gRPC is answered on the one port, where it is named h2c",
            "gateways then send everything as HTTP/2 with prior knowledge, and probes go on in HTTP/1.1",
            speaks_grpc,
        ),
        Check(
            "admission",
            "what containerConcurrency admits of its eleven-fold is answered, all of it",
            "the proxy queues ten times as many as it admits, and refuses the rest itself",
            any_container.admits(call, CONCURRENCY, 11 * CONCURRENCY),
        ),
        REFUSES,
        Check("writes", "nothing is written but below /tmp", "only /tmp is sure to be writable", writes_only_to_tmp),
        Check(
            "sigterm-serves-on",
            "requests are answered for some seconds after SIGTERM",
            "routers learn late of a pod's end, and the queue proxy goes on passing on what they send",
            any_container.serves_on(call, SERVES_ON_S),
        ),
        Check(
            "sigterm-exit",
            "it ends with status 0 within its grace",
            "SIGKILL follows after timeoutSeconds",
            any_container.ends_in_time,
        ),
    ),
)
