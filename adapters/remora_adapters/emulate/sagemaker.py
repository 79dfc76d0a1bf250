"""Amazon SageMaker, an endpoint with one model: how it starts, probes, calls and ends a container.

Figures and rules are those of the developer guide ("Custom Inference Code with Hosting Services") and of the service
model that botocore carries; what the platform does with a violation is said in each check.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from remora_adapters.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe, Skipped
from remora_adapters.emulate import container as any_container
from remora_adapters.emulate.asking import HttpReply, Line
from remora_adapters.emulate.container import must_answer
from remora_adapters.emulate.sagemaker_runtime import ANSWER_S, PAYLOAD_BYTES
from remora_adapters.emulate.stage import Stage

PING_S = 2.0
ACCEPT_S = 0.25
GRACE_S = 30.0
SAFE_PORTS = range(18_000, 18_100)
"""The range that is told to a container; what it listens to besides the bound port must lie in it."""

ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_VISIBLE = re.compile(r"[ -~]{0,1024}")
_TAKEN_S = 0.1
"""A request that was sent this long ago has been read by any server."""
_MODES = ("SINGLE_RECORD", "MULTI_RECORD")
_LINES, _TURNS = 8, 8


def launch(settings: EmulateSettings, port: int, mounts: Path, **more: str) -> Launch:
    """``docker run IMAGE serve``, with the model in its place and a port of the platform's choice."""
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
    """POST /invocations as the platform sends it: with its own headers and no others."""
    sent = {"Content-Type": content_type or stage.settings.content_type, "Accept": "*/*", **headers}
    return stage.ask("POST", "/invocations", body, sent, timeout_s=ANSWER_S)


# -- the start ------------------------------------------------------------------------------------------------------


def becomes_ready(stage: Stage) -> None:
    if not any(seen.answer.status for seen in stage.boot) and stage.settings.command and not stage.process.running:
        raise Skipped("it ended before it answered anything: see serve-argument")
    any_container.becomes_ready(stage)


def pings_in_time(stage: Stage) -> None:
    if not stage.boot:
        raise Skipped("it was never asked")
    any_container.probes_in_time(stage)
    if stage.ready:
        must_answer(stage.ask("GET", "/ping", timeout_s=stage.probe_s), "GET /ping after the start")


def accepts_quickly(stage: Stage) -> None:
    if not stage.boot:
        raise Skipped("it was never asked")
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
    """Runs before every other invocation: the first one after the first good ping must be answered."""
    must_answer(invoke(stage, stage.body), "the first invocation after /ping said 200")


def answers_again(stage: Stage) -> None:
    first = must_answer(invoke(stage, stage.body), "an invocation")
    if first.headers.get("content-encoding"):
        raise Failed(f"the answer is encoded as {first.headers['content-encoding']}, which nobody asked for")


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
            raise Failed(f"a body that is no request got {answer.shown}")
        if not answer.body:
            raise Failed(f"the {answer.status} has no body: clients see it as OriginalMessage")


def takes_the_largest_body(stage: Stage) -> None:
    answer = invoke(stage, b"x" * PAYLOAD_BYTES, "application/octet-stream")
    if not answer.status:
        raise Failed(f"a body of {PAYLOAD_BYTES} bytes: {answer.shown}")
    must_answer(stage.ask("GET", "/ping", timeout_s=stage.probe_s), "GET /ping after a body of the largest size")


def answers_pings_while_busy(stage: Stage) -> None:
    """Eight connections with eight invocations each; all have connected and sent before the first ping does."""
    body, headers = stage.body, {"Content-Type": stage.settings.content_type, "Accept": "*/*"}
    lines = [Line(stage.address, ANSWER_S) for _ in range(_LINES)]
    for line in lines:
        line.send("POST", "/invocations", body, headers)

    def take_turns(line: Line) -> list[HttpReply]:
        found = [line.answer()]
        for _ in range(_TURNS - 1):
            line.send("POST", "/invocations", body, headers)
            found.append(line.answer())
        return found

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
        said = json.loads(must_answer(answer, "GET /execution-parameters").body)
    except ValueError as error:
        raise Failed(f"/execution-parameters is no JSON: {answer.shown}") from error
    numbers = [said.get(name, 1) for name in ("MaxConcurrentTransforms", "MaxPayloadInMB")]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise Failed(f"/execution-parameters says {said}")
    if said.get("BatchStrategy", _MODES[0]) not in _MODES:
        raise Failed(f"BatchStrategy is {said['BatchStrategy']!r}: one of {', '.join(_MODES)}")


def keeps_records_in_order(stage: Stage) -> None:
    """Batch transform with MultiRecord: joined records, one line out for each line in."""
    if "records" not in stage.settings.given:
        raise Skipped("needs records, one a line: --with records=FILE [--with records-type=TYPE]")
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
    """Sends SIGTERM while requests are surely under way; ``sigterm-exit`` then judges the end."""
    process, body = stage.process, stage.body
    if "slow-body" in stage.settings.given:
        body = Path(stage.settings.given["slow-body"]).read_bytes()
    lines = [Line(stage.address, ANSWER_S) for _ in range(4)]
    headers = {"Content-Type": stage.settings.content_type}
    for line in lines:  # a connection that was answered once has surely been accepted
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
        "SageMaker runs `docker run IMAGE serve`; a container that takes it for something else never starts",
        any_container.starts,
    ),
    (
        "ready",
        "/ping says 200 within the start-up health check's time",
        "the endpoint's creation fails after 4 minutes, or ContainerStartupHealthCheckTimeoutInSeconds",
        becomes_ready,
    ),
    (
        "ping-time",
        "every /ping is answered within 2 s, also while models are loaded",
        "a ping that takes longer counts as failed",
        pings_in_time,
    ),
    (
        "accept-time",
        "connections are accepted within 250 ms, also while models are loaded",
        "the developer guide asks for it; a loop that is blocked by loading does not",
        accepts_quickly,
    ),
    early=True,
)

LISTENERS = _table(
    ("ping-empty", "/ping has an empty body", "the body is not read; the guide asks for none", ping_is_empty),
    (
        "bind-to-port",
        "it listens on SAGEMAKER_BIND_TO_PORT",
        "in a pipeline of containers the platform gives each another port than 8080",
        binds_the_given_port,
    ),
    (
        "all-interfaces",
        "it listens on all interfaces",
        "the platform calls from outside the container: a server on loopback is never reached",
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
        "nothing under the model's folder is written",
        "the platform owns /opt/ml/model: treat it as read-only",
        any_container.leaves_the_model_alone,
    ),
    (
        "sigterm-drain",
        "requests that were taken before SIGTERM are answered",
        "every scale-in and every update ends containers; what is lost is a client's error",
        answers_what_it_has_taken,
    ),
    (
        "sigterm-exit",
        "it ends with status 0 within 30 s of SIGTERM",
        "SIGKILL follows after 30 s (120 s are for training jobs)",
        any_container.ends_in_time,
    ),
)

INVOCATIONS = _table(
    (
        "ready-means-ready",
        "the first invocation after the first good ping is answered",
        "traffic comes as soon as /ping says 200",
        is_ready_when_it_says_so,
    ),
    (
        "invocations",
        "/invocations answers within 60 s, and not compressed",
        "clients get a 424 ModelError for anything but 2xx, and see the bytes as they are",
        answers_again,
    ),
    (
        "platform-headers",
        "the platform's headers, and unknown ones, change nothing",
        "they come with every request; new ones may come any day",
        tolerates_platform_headers,
    ),
    (
        "custom-attributes",
        "custom attributes of an answer are at most 1024 visible ASCII characters",
        "the platform refuses others, and the client gets an error for a good answer",
        attributes_can_travel,
    ),
    (
        "bad-body",
        "a body that cannot be read is a 4xx with a text",
        "the text is all that a client ever sees of the container (OriginalMessage); a 5xx is retried",
        refuses_what_it_cannot_read,
    ),
    (
        "largest-body",
        "a body of 6 MiB is answered, and /ping after it",
        "that is what InvokeEndpoint lets through",
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
        "an answer in pieces leaves in pieces",
        "InvokeEndpointWithResponseStream passes chunks on as they come; one that is buffered is no stream",
        streams_piece_by_piece,
    ),
    (
        "execution-parameters",
        "/execution-parameters is absent or readable",
        "batch transform asks it and fails the job on an answer it cannot read",
        execution_parameters_are_readable,
    ),
    (
        "records",
        "records that are sent together are answered one for one, in order",
        "batch transform joins records (MultiRecord) and puts answers beside their inputs by position",
        keeps_records_in_order,
    ),
)


def api(stage: Stage, port: int) -> AbstractContextManager[object]:
    """The SageMaker Runtime API; objects of S3 are below ``--with objects=DIR``."""
    from remora_adapters.emulate.sagemaker_runtime import Endpoint, runtime_api

    objects = Path(stage.settings.given.get("objects", stage.mounts / "objects"))
    return runtime_api(Endpoint(stage.address, objects), port)


PLATFORM = Platform(
    title="sagemaker",
    launch=launch,
    probe=Probe("/ping", PING_S, 5.0, 240.0),
    grace_s=GRACE_S,
    checks=(*START, *LISTENERS, *INVOCATIONS, *END),
    api=api,
)
