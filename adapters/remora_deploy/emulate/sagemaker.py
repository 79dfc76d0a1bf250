"""Emulator of an Amazon SageMaker endpoint with one model.

Limits and rules are those of the developer guide ("Custom Inference Code with Hosting Services") and of the service
model in botocore; each check states the platform's reaction to a violation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from remora.system.json_text import read_json
from remora_deploy.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe, Skipped
from remora_deploy.emulate import container as any_container
from remora_deploy.emulate.asking import HttpReply, Line
from remora_deploy.emulate.container import must_answer
from remora_deploy.emulate.generation import generation_checks
from remora_deploy.emulate.sagemaker_runtime import ANSWER_S, PAYLOAD_BYTES
from remora_deploy.emulate.stage import Stage

PING_S = 2.0
ACCEPT_S = 0.25
GRACE_S = 30.0
SAFE_PORTS = range(18_000, 18_100)
"""Port range given to a container for its listeners besides the bound port."""

ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_VISIBLE = re.compile(r"[ -~]{0,1024}")
_TAKEN_S = 0.1
"""Time after which any server has read a sent request."""
_MODES = ("SINGLE_RECORD", "MULTI_RECORD")
_LINES, _TURNS = 8, 8


def launch(settings: EmulateSettings, port: int, mounts: Path, **more: str) -> Launch:
    """Return the launch of ``docker run IMAGE serve``, with the model and the port."""
    if settings.model is not None:
        (mounts / "model").symlink_to(settings.model)
    environ = {
        "SAGEMAKER_BASE_DIR": str(mounts),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_SAFE_PORT_RANGE": f"{SAFE_PORTS.start}-{SAFE_PORTS.stop - 1}",
        **more,
    }
    return Launch(("serve",), environ, port)


def invoke(stage: Stage, body: bytes, content_type: str = "", **headers: str) -> HttpReply:
    """Send POST /invocations as the platform does, with the platform's headers only."""
    sent = {"Content-Type": content_type or stage.settings.content_type, "Accept": "*/*", **headers}
    return stage.ask("POST", "/invocations", body, sent, timeout_s=ANSWER_S)


# -- the start ------------------------------------------------------------------------------------------------------


def becomes_ready(stage: Stage) -> None:
    if not any(seen.answer.status for seen in stage.boot) and stage.settings.command and not stage.process.running:
        raise Skipped("it exited before its first answer: see serve-argument")
    any_container.becomes_ready(stage)


def pings_in_time(stage: Stage) -> None:
    if not stage.boot:
        raise Skipped("it was never probed")
    any_container.probes_in_time(stage)
    if stage.ready:
        must_answer(stage.ask("GET", "/ping", timeout_s=stage.probe_s), "GET /ping after the start")


def accepts_quickly(stage: Stage) -> None:
    if not stage.boot:
        raise Skipped("it was never probed")
    limit_s = stage.limit_s(ACCEPT_S)
    slow = [seen.answer.connect_s for seen in stage.boot if seen.answer.connect_s > limit_s]
    if slow:
        raise Failed(f"a connection took {max(slow) * 1000:.0f} ms during the start")


def ping_is_empty(stage: Stage) -> None:
    answer = must_answer(stage.ask("GET", "/ping", timeout_s=stage.probe_s), "GET /ping")
    if answer.body:
        raise Failed(f"/ping has a body of {len(answer.body)} bytes")


def binds_the_given_port(stage: Stage) -> None:
    ports = [row.port for row in stage.process.listening()]
    if stage.launch.port not in ports:
        raise Failed(f"SAGEMAKER_BIND_TO_PORT={stage.launch.port}, but it listens on {ports or 'nothing'}")


def binds_all_interfaces(stage: Stage) -> None:
    mine = [row for row in stage.process.listening() if row.port == stage.address.port]
    if mine and not any(row.everywhere for row in mine):
        raise Failed(f"port {stage.address.port} is bound to some interfaces only")


def keeps_to_safe_ports(stage: Stage) -> None:
    strays = [
        row.port for row in stage.process.listening() if row.port != stage.address.port and row.port not in SAFE_PORTS
    ]
    if strays:
        raise Failed(
            f"it also listens on {strays}; SAGEMAKER_SAFE_PORT_RANGE is {SAFE_PORTS.start}-{SAFE_PORTS.stop - 1}"
        )


# -- invocations ----------------------------------------------------------------------------------------------------


def is_ready_when_it_says_so(stage: Stage) -> None:
    """The first invocation after the first successful ping succeeds.

    The check runs before all other invocations."""
    must_answer(invoke(stage, stage.body), "the first invocation after /ping answered 200")


def answers_again(stage: Stage) -> None:
    first = must_answer(invoke(stage, stage.body), "an invocation")
    if first.headers.get("content-encoding"):
        raise Failed(f"the answer is encoded as {first.headers['content-encoding']}, which the request did not accept")


def tolerates_platform_headers(stage: Stage) -> None:
    headers = {
        "X-Amzn-SageMaker-Custom-Attributes": "c000b4f9-df62-4c85-a0bf-7c525f9104a4",
        "X-Amzn-SageMaker-Inference-Id": "request-1",
        "X-Amzn-SageMaker-Target-Variant": "AllTraffic",
        "X-Amzn-SageMaker-Unheard-Of": "x",
    }
    must_answer(invoke(stage, stage.body, **headers), "an invocation with the platform's headers")


def attributes_can_travel(stage: Stage) -> None:
    sent = "traceparent=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = must_answer(invoke(stage, stage.body, **{ATTRIBUTES: sent}), "an invocation with custom attributes")
    value = answer.headers.get(ATTRIBUTES.lower(), "")
    if not _VISIBLE.fullmatch(value):
        raise Failed(f"the custom attributes of the answer are {len(value)} characters, or not visible ASCII")


def refuses_what_it_cannot_read(stage: Stage) -> None:
    for body in (b'{"inputs": [', b"\x00\xff not a request"):
        answer = invoke(stage, body, "application/json")
        if not 400 <= answer.status < 500:
            raise Failed(f"an invalid body got {answer.shown}")
        if not answer.body:
            raise Failed(f"the {answer.status} has no body: clients see it as OriginalMessage")


def takes_the_largest_body(stage: Stage) -> None:
    answer = invoke(stage, b"x" * PAYLOAD_BYTES, "application/octet-stream")
    if not answer.status:
        raise Failed(f"a body of {PAYLOAD_BYTES} bytes: {answer.shown}")
    must_answer(stage.ask("GET", "/ping", timeout_s=stage.probe_s), "GET /ping after a body of the largest size")


def answers_pings_while_busy(stage: Stage) -> None:
    """Eight connections send eight invocations each, before and while pings are sent."""
    body, headers = stage.body, {"Content-Type": stage.settings.content_type, "Accept": "*/*"}
    lines = [Line(stage.address, ANSWER_S) for _ in range(_LINES)]
    for line in lines:
        line.send("POST", "/invocations", body, headers)

    def take_turns(line: Line) -> list[HttpReply]:
        answers_of_line = [line.answer()]
        for _ in range(_TURNS - 1):
            line.send("POST", "/invocations", body, headers)
            answers_of_line.append(line.answer())
        return answers_of_line

    with ThreadPoolExecutor(_LINES) as pool:
        calls = [pool.submit(take_turns, line) for line in lines]
        pings = [stage.ask("GET", "/ping", timeout_s=stage.probe_s)]
        while not all(call.done() for call in calls):
            pings.append(stage.ask("GET", "/ping", timeout_s=stage.probe_s))
    for line in lines:
        line.close()
    answers = [answer for call in calls for answer in call.result()]
    lost = [answer for answer in answers if not 200 <= answer.status < 300]
    if lost:
        raise Failed(f"{len(lost)} of {len(answers)} invocations at the same time failed, such as: {lost[0].shown}")
    bad = [ping for ping in pings if ping.status != 200]
    if bad:
        raise Failed(f"{len(bad)} of {len(pings)} pings under load failed, such as: {bad[0].shown}")


def streams_piece_by_piece(stage: Stage) -> None:
    path = stage.settings.given.get("stream-body")
    if path is None:
        raise Skipped("needs a request that is answered in pieces: --with stream-body=FILE")
    answer = must_answer(invoke(stage, Path(path).read_bytes()), "a streamed invocation")
    if answer.headers.get("transfer-encoding") != "chunked":
        raise Failed("the answer is not chunked")
    if len(answer.pieces) < 2:
        raise Failed("the answer came in one piece")


def execution_parameters_are_readable(stage: Stage) -> None:
    answer = stage.ask("GET", "/execution-parameters", timeout_s=stage.probe_s)
    if answer.status in (400, 404, 405):
        return
    try:
        parameters = read_json(must_answer(answer, "GET /execution-parameters").body)
    except ValueError as error:
        raise Failed(f"/execution-parameters is not JSON: {answer.shown}") from error
    numbers = [parameters.get(name, 1) for name in ("MaxConcurrentTransforms", "MaxPayloadInMB")]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise Failed(f"/execution-parameters answered {parameters}")
    if parameters.get("BatchStrategy", _MODES[0]) not in _MODES:
        raise Failed(f"BatchStrategy is {parameters['BatchStrategy']!r}: expected one of {', '.join(_MODES)}")


def keeps_records_in_order(stage: Stage) -> None:
    """Batch transform with MultiRecord gets one output line per input record."""
    if "records" not in stage.settings.given:
        raise Skipped("needs records, one per line: --with records=FILE [--with records-type=TYPE]")
    media = stage.settings.given.get("records-type", "text/csv")
    records = [line for line in Path(stage.settings.given["records"]).read_bytes().splitlines() if line]
    joined = b"".join(record + b"\n" for record in records)
    whole = must_answer(invoke(stage, joined, media, Accept=media), f"{len(records)} records at once")
    lines = whole.body.splitlines()
    if len(lines) != len(records):
        raise Failed(f"{len(records)} records in, {len(lines)} lines out")
    for at in sorted({0, len(records) // 2, len(records) - 1}):
        alone = must_answer(invoke(stage, records[at] + b"\n", media, Accept=media), "one record").body.splitlines()
        if alone != [lines[at]]:
            raise Failed(f"record {at + 1} alone gives {alone}, among the others {lines[at]!r}")


# -- the end --------------------------------------------------------------------------------------------------------


def answers_what_it_has_taken(stage: Stage) -> None:
    """Send SIGTERM while requests are in flight.

    ``sigterm-exit`` then checks the exit."""
    process, body = stage.process, stage.body
    if "slow-body" in stage.settings.given:
        body = Path(stage.settings.given["slow-body"]).read_bytes()
    lines = [Line(stage.address, ANSWER_S) for _ in range(4)]
    headers = {"Content-Type": stage.settings.content_type}
    for line in lines:  # a connection with an answer has been accepted
        line.send("POST", "/invocations", stage.body, headers)
        must_answer(line.answer(), "an invocation before SIGTERM")
    for line in lines:
        line.send("POST", "/invocations", body, headers)
    time.sleep(_TAKEN_S)
    process.terminate()
    answers = [line.answer() for line in lines]
    for line in lines:
        line.close()
    process.wait(stage.grace_s)
    lost = [answer for answer in answers if not 200 <= answer.status < 300]
    if lost:
        raise Failed(f"{len(lost)} of {len(answers)} requests were lost at SIGTERM, such as: {lost[0].shown}")


def _table(*rows: tuple[str, str, str, Callable[[Stage], None]], early: bool = False) -> tuple[Check, ...]:
    return tuple(Check(*row, early=early) for row in rows)


START = _table(
    (
        "serve-argument",
        "the image starts with the argument `serve`",
        "SageMaker runs `docker run IMAGE serve`; a container that does not accept the argument never starts",
        any_container.starts,
    ),
    (
        "ready",
        "/ping answers 200 within the time of the startup health check",
        "the endpoint's creation fails after 4 minutes, or ContainerStartupHealthCheckTimeoutInSeconds",
        becomes_ready,
    ),
    (
        "ping-time",
        "every /ping is answered within 2 s, even while models load",
        "a ping that takes longer counts as failed",
        pings_in_time,
    ),
    (
        "accept-time",
        "connections are accepted within 250 ms, even while models load",
        "the developer guide requires it; loading must not block the event loop",
        accepts_quickly,
    ),
    early=True,
)

LISTENERS = _table(
    ("ping-empty", "/ping has an empty body", "the guide requires it; the platform ignores the body", ping_is_empty),
    (
        "bind-to-port",
        "it listens on SAGEMAKER_BIND_TO_PORT",
        "in a pipeline each container gets a port other than 8080",
        binds_the_given_port,
    ),
    (
        "all-interfaces",
        "it listens on all interfaces",
        "the platform cannot reach a server on the container's loopback",
        binds_all_interfaces,
    ),
    (
        "safe-ports",
        "other listeners are inside SAGEMAKER_SAFE_PORT_RANGE",
        "other containers of the endpoint use the ports around it",
        keeps_to_safe_ports,
    ),
)

END = _table(
    (
        "model-read-only",
        "the model's folder is not modified",
        "the platform owns /opt/ml/model, which is read-only",
        any_container.leaves_the_model_alone,
    ),
    (
        "sigterm-drain",
        "requests received before SIGTERM are answered",
        "every scale-in and update stops containers; a lost request is an error for its client",
        answers_what_it_has_taken,
    ),
    (
        "sigterm-exit",
        "it exits with status 0 within 30 s of SIGTERM",
        "SIGKILL follows after 30 s (120 s are for training jobs)",
        any_container.ends_in_time,
    ),
)

INVOCATIONS = _table(
    (
        "ready-means-ready",
        "the first invocation after the first successful ping is answered",
        "traffic starts as soon as /ping answers 200",
        is_ready_when_it_says_so,
    ),
    (
        "invocations",
        "/invocations answers within 60 s, uncompressed",
        "clients get a 424 ModelError for anything but 2xx, and see the bytes unchanged",
        answers_again,
    ),
    (
        "platform-headers",
        "the platform's headers and unknown headers have no effect",
        "every request has them, and the platform may add new ones",
        tolerates_platform_headers,
    ),
    (
        "custom-attributes",
        "an answer's custom attributes are at most 1024 visible ASCII characters",
        "the platform refuses others, and the client gets an error instead of the answer",
        attributes_can_travel,
    ),
    (
        "bad-body",
        "an invalid body gets a 4xx with a reason",
        "clients see only this text (OriginalMessage); a 5xx is retried",
        refuses_what_it_cannot_read,
    ),
    (
        "largest-body",
        "a body of 6 MiB and the following /ping are answered",
        "this is InvokeEndpoint's limit",
        takes_the_largest_body,
    ),
    (
        "ping-under-load",
        "/ping and concurrent invocations are all answered",
        "a container that fails its pings under load is replaced when it is needed most",
        answers_pings_while_busy,
    ),
    (
        "streaming",
        "a streamed answer arrives in chunks",
        "InvokeEndpointWithResponseStream forwards each chunk at once; a buffered answer is not a stream",
        streams_piece_by_piece,
    ),
    (
        "execution-parameters",
        "/execution-parameters is absent or valid",
        "batch transform requests it and fails the job on an invalid answer",
        execution_parameters_are_readable,
    ),
    (
        "records",
        "joined records get one output each, in order",
        "batch transform joins records (MultiRecord) and matches outputs to inputs by position",
        keeps_records_in_order,
    ),
)


def api(stage: Stage, port: int) -> AbstractContextManager[object]:
    """Serve the SageMaker Runtime API, with S3 objects below ``--with objects=DIR``."""
    from remora_deploy.emulate.sagemaker_runtime import Endpoint, runtime_api

    objects = Path(stage.settings.given.get("objects", stage.mounts / "objects"))
    return runtime_api(Endpoint(stage.address, objects), port)


PLATFORM = Platform(
    title="sagemaker",
    launch=launch,
    probe=Probe("/ping", PING_S, 5.0, 240.0),
    grace_s=GRACE_S,
    checks=(*START, *LISTENERS, *INVOCATIONS, *generation_checks(lambda _: "/invocations"), *END),
    api=api,
)
