"""Emulator of AWS Lambda, with the Runtime API, init phase, limits, deadlines and freezes.

The command is a runtime client with its handler, such as ``python -m awslambdaric FILE.handler``. Limits are those of
the Lambda developer guide (runtime environment, quotas) and of the Runtime API.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from remora.system.json_text import read_json
from remora_deploy.emulate import Check, EmulateSettings, Failed, Inapplicable, Launch, Platform, Probe, Skipped
from remora_deploy.emulate import container as any_container
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.examples import only_model
from remora_deploy.emulate.generation import generation_checks
from remora_deploy.emulate.lambda_runtime import ANSWER_BYTES, PAYLOAD_BYTES, READY, RuntimeApi, RuntimeReply
from remora_deploy.emulate.process import Process
from remora_deploy.emulate.stage import Stage

INIT_S = 10.0
TIMEOUT_S = 30.0
SHORT_S = 2.0
FREEZE_S = 2.0
GRACE_S = 2.0
HTTP_STREAM = "application/vnd.awslambda.http-integration-response"
HEAD_BYTES = 16 << 10
"""Limit of a streamed answer's head."""
_AGAIN_S = 60.0
_LOOK_S = 0.02


def launch(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """Return a runtime's environment, with the models in ``models`` of the function's folder.

    Raises ValueError for a URL, because the function calls the API, whose address it gets at startup.
    """
    if settings.url:
        raise ValueError("a function polls Lambda and has no URL: pass the command that starts it")
    task = mounts / "task"
    task.mkdir()
    if settings.model is not None:
        (task / "models").symlink_to(settings.model)
    environ = {
        "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{port}",
        "AWS_LAMBDA_FUNCTION_NAME": "emulated",
        "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "1769",
        "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
        "AWS_REGION": "eu-central-1",
        "LAMBDA_TASK_ROOT": str(task),
    }
    return Launch((), environ, port)


def runtime_api(launched: Launch) -> AbstractContextManager[object]:
    """Return the API that the function calls."""
    return RuntimeApi(launched.port)


def api_of(stage: Stage) -> RuntimeApi:
    """Return the API that the function of this stage calls."""
    assert isinstance(stage.callee, RuntimeApi)
    return stage.callee


def invoke(stage: Stage, event: bytes, timeout_s: float = TIMEOUT_S) -> RuntimeReply:
    """Return the function's reply to an event. Raises Failed if it exits or exceeds its time.

    The deadline sent to the function is the platform's, whatever ``patience`` is.
    """
    return _invoke(api_of(stage), stage.process, event, timeout_s, _spare_s(stage, timeout_s))


def _invoke(api: RuntimeApi, process: Process, event: bytes, timeout_s: float, spare_s: float) -> RuntimeReply:
    invocation = api.send_event(event, timeout_s)
    try:
        while not invocation.done.wait(_LOOK_S):
            if not process.running and not invocation.done.is_set():
                raise Failed(f"the process ended instead of answering: {process.log_tail()}")
            if time.time() > invocation.deadline + spare_s:
                raise Failed(f"no reply within the {timeout_s:g} s of the invocation")
    finally:
        api.drop(invocation)
    assert invocation.reply is not None
    return invocation.reply


def _spare_s(stage: Stage, timeout_s: float) -> float:
    """Return the tolerance of a reply's lateness."""
    return stage.limit_s(timeout_s) - timeout_s


def must_answer(reply: RuntimeReply, what: str) -> RuntimeReply:
    """Return the reply, or raise Failed for an error."""
    if reply.error:
        raise Failed(f"{what} got {reply.shown}")
    return reply


def must_describe_error(body: bytes, what: str) -> None:
    """Raise Failed for an error without errorType and errorMessage."""
    try:
        error = read_json(body)
        described = bool(error["errorType"]) and isinstance(error["errorMessage"], str)
    except (ValueError, KeyError, TypeError):
        described = False
    if not described:
        text = body[:120].decode("utf-8", "replace")
        raise Failed(f"{what}: the error has no errorType and errorMessage, but is {text!r}")


# -- the init phase -------------------------------------------------------------------------------------------------


def starts(stage: Stage) -> None:
    if stage.ready or stage.process.running:
        return
    init_error = api_of(stage).init_error
    report = f"reported {init_error.decode('utf-8', 'replace')!r}" if init_error else "reported nothing"
    raise Failed(f"the process ended in its init phase, and {report}: {stage.process.log_tail()}")


def asks_in_time(stage: Stage) -> None:
    if stage.ready:
        return
    if not stage.process.running:
        raise Skipped("it ended: see starts")
    raise Failed(f"it did not ask for an event within {stage.settings.startup_s or stage.limit_s(INIT_S):g} s")


def reports_a_failed_init(stage: Stage) -> None:
    """Start the command again with an empty folder for its code and models."""
    if stage.settings.model is None:
        raise Skipped("needs the models' folder, to start without it: --model DIR")
    empty = stage.mounts / "empty"
    empty.mkdir()
    with _restarted(stage, "failed-init.txt", LAMBDA_TASK_ROOT=str(empty)) as (api, process):
        if api.polled_once.is_set():
            raise Inapplicable("it starts without models as well")
        if process.running:
            raise Failed(f"without models it neither started nor ended within {_AGAIN_S:g} s")
        if api.init_error is None:
            raise Failed(f"without models it ended and reported nothing: {process.log_tail()}")
        must_describe_error(api.init_error, "an init without models")


@contextmanager
def _restarted(stage: Stage, log: str, **environ: str) -> Iterator[tuple[RuntimeApi, Process]]:
    """Start the command again and yield once it polls for an event, has exited, or hangs."""
    with RuntimeApi(0) as api:
        variables = {**stage.environ, "AWS_LAMBDA_RUNTIME_API": api.address, **environ}
        process = Process(stage.settings.command, variables, stage.mounts / log)
        try:
            end = time.monotonic() + _AGAIN_S
            while process.running and not api.polled_once.is_set() and time.monotonic() < end:
                time.sleep(_LOOK_S)
            yield api, process
        finally:
            process.kill()


def goes_on_from_a_snapshot(stage: Stage) -> None:
    """Start the command again as SnapStart does, which snapshots it before its first event."""
    with _restarted(stage, "snapshot.txt", AWS_LAMBDA_INITIALIZATION_TYPE="snap-start") as (api, process):
        if not api.restored.is_set() and api.polled_once.is_set():
            raise Inapplicable("its runtime client does not support snapshots")
        if api.restore_error is not None:
            raise Failed(f"it failed to restore its snapshot: {api.restore_error[:300].decode('utf-8', 'replace')}")
        if not api.polled_once.is_set():
            raise Failed(f"it did not ask for an event: {process.log_tail()}")
        must_answer(
            _invoke(api, process, stage.body, TIMEOUT_S, _spare_s(stage, TIMEOUT_S)), "the first event after a snapshot"
        )


# -- invocations ----------------------------------------------------------------------------------------------------


def answers(stage: Stage) -> None:
    for count in ("first", "second"):
        must_answer(invoke(stage, stage.body), f"the {count} event")


def answers_http(stage: Stage) -> None:
    """Send the request as an event of a function URL (payload format 2.0)."""
    path = stage.settings.given.get("path") or only_model(stage, send_by_url).path
    if not path:
        raise Skipped("needs the path of the request: --with path=PATH")
    reply = must_answer(invoke(stage, url_event(stage, path, stage.body)), "a function URL's event")
    if reply.pieces:
        raise Inapplicable("it answers with streams: see stream")
    try:
        answer = read_json(reply.body)
        good = isinstance(answer["statusCode"], int) and isinstance(answer.get("body", ""), str)
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise Failed(f"a function URL's event got {reply.shown}: expected a number as statusCode and a string as body")
    if not 200 <= answer["statusCode"] < 300:
        raise Failed(f"a function URL's event got {reply.shown}")


def streams(stage: Stage) -> None:
    """Send the request of a stream as an event of a function URL."""
    path, body = stage.settings.given.get("stream-path"), stage.settings.given.get("stream-body")
    if path is None:
        raise Skipped("needs the path of a request whose answer is a stream: --with stream-path=PATH")
    event = url_event(stage, path, Path(body).read_bytes() if body else stage.body)
    reply = must_answer(invoke(stage, event), "a request for a stream")
    head, mark, rest = reply.body.partition(bytes(8))
    if not reply.pieces or reply.content_type != HTTP_STREAM or not mark or len(head) > HEAD_BYTES:
        raise Failed(
            f"a request for a stream got {reply.shown} of the type {reply.content_type}: expected the response mode "
            f"streaming, the type {HTTP_STREAM}, and a head of JSON before eight zero bytes"
        )
    try:
        status = read_json(head)["statusCode"]
    except (ValueError, KeyError, TypeError):
        raise Failed(f"the head of a stream is {head[:160]!r}: expected JSON with statusCode") from None
    if status != 200 or not rest:
        raise Failed(f"a request for a stream got {reply.shown}")
    if len(reply.pieces) < 3:
        raise Failed(f"head and body came in {len(reply.pieces)} pieces: expected a piece for each part of the answer")


def send_by_url(stage: Stage, method: str, path: str, body: bytes) -> HttpReply:
    """Send a request as the event of a function URL, and return the HTTP answer in the reply."""
    begin = time.monotonic()
    reply = must_answer(invoke(stage, url_event(stage, path, body, method)), f"{method} {path}")
    head, _, rest = reply.body.partition(bytes(8)) if reply.pieces else (reply.body, b"", b"")
    try:
        answer = read_json(head)
        status, headers = int(answer["statusCode"]), {name.lower(): text for name, text in answer["headers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failed(f"{method} {path} got {reply.shown}: expected JSON with statusCode and headers") from None
    body = rest if reply.pieces else str(answer.get("body", "")).encode()
    pieces = tuple((at_s - begin, piece) for at_s, piece in reply.pieces[1:])
    return HttpReply(status, headers, body, pieces=pieces)


def chat_path(stage: Stage) -> str:
    """Return the path of chats."""
    return "/v1/chat/completions"


def example(stage: Stage) -> bytes:
    """Return the V2 request of the only model, which is an event of remora's handler, or b""."""
    return only_model(stage, send_by_url).v2


def url_event(stage: Stage, path: str, body: bytes, method: str = "POST") -> bytes:
    """Return a request as the event of a function URL."""
    event = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": "",
        "headers": {"content-type": stage.settings.content_type, "host": "emulated.lambda-url.eu-central-1.on.aws"},
        "requestContext": {
            "stage": "$default",
            "domainName": "emulated.lambda-url.eu-central-1.on.aws",
            "http": {"method": method, "path": path, "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1", "userAgent": "x"},
        },
        "body": body.decode(),
        "isBase64Encoded": False,
    }
    return json.dumps(event).encode()


def tells_errors(stage: Stage) -> None:
    for event in (b"null", b'{"unheard-of": [1, 2]}', b'"text"'):
        reply = invoke(stage, event)
        if reply.error:
            must_describe_error(reply.body, f"the event {event.decode()}")
    must_answer(invoke(stage, stage.body), "a good event after bad ones")


def takes_the_largest_event(stage: Stage) -> None:
    reply = invoke(stage, b'"%b"' % (b"x" * (PAYLOAD_BYTES - 2)))
    if reply.error:
        must_describe_error(reply.body, f"an event of {PAYLOAD_BYTES} bytes")
    must_answer(invoke(stage, stage.body), "a good event after one of the largest size")


def keeps_answers_short(stage: Stage) -> None:
    path = stage.settings.given.get("large-body")
    if path is None:
        raise Skipped(f"needs an event whose answer is longer than {ANSWER_BYTES} bytes: --with large-body=FILE")
    invoke(stage, Path(path).read_bytes())
    if api_of(stage).observed.longest > ANSWER_BYTES:
        raise Failed(f"it sent an answer of {api_of(stage).observed.longest} bytes")


def keeps_deadlines(stage: Stage) -> None:
    path = stage.settings.given.get("slow-body")
    if path is None:
        raise Skipped(f"needs an event that takes longer than {SHORT_S:g} s: --with slow-body=FILE")
    reply = invoke(stage, Path(path).read_bytes(), SHORT_S)
    if reply.late_s > _spare_s(stage, SHORT_S):
        raise Failed(f"the reply came {reply.late_s:.2f} s after the invocation's end")


def survives_freezes(stage: Stage) -> None:
    """Freeze all its processes while it waits for an event, as between two invocations."""
    must_answer(invoke(stage, stage.body), "an event before the freeze")
    process = stage.process
    if not api_of(stage).idle.wait(stage.limit_s(TIMEOUT_S)):
        raise Failed(f"it did not ask for another event within {TIMEOUT_S:g} s of its answer")
    process.freeze()
    try:
        time.sleep(FREEZE_S)
    finally:
        process.thaw()
    must_answer(invoke(stage, stage.body), f"the event after {FREEZE_S:g} s of being frozen")


def takes_one_at_a_time(stage: Stage) -> None:
    early = api_of(stage).observed.early
    if early:
        raise Failed(f"it asked {early} times for the next event before it had answered the last")


def answers_what_it_was_given(stage: Stage) -> None:
    strays = api_of(stage).observed.strays
    if strays:
        raise Failed(f"it answered {len(strays)} events that it did not have, such as {strays[0][:60]!r}")


def ends_at_sigterm(stage: Stage) -> None:
    """Send SIGTERM, as to functions with extensions, and ignore the exit status."""
    stage.process.terminate()
    if stage.process.wait(stage.grace_s).killed:
        raise Failed(f"it was still there {stage.grace_s:g} s after SIGTERM")


PLATFORM = Platform(
    title="lambda",
    launch=launch,
    probe=Probe(READY, 5.0, 0.02, INIT_S),
    grace_s=GRACE_S,
    callee=runtime_api,
    example=example,
    checks=(
        Check(
            "starts",
            "the process survives its init phase",
            "a function that exits there fails every invocation with Runtime.ExitError and repeats its init each time",
            starts,
            True,
        ),
        Check(
            "init",
            "it asks for its first event within 10 s",
            "after 10 s the init is repeated within the first invocation and its timeout",
            asks_in_time,
            True,
        ),
        Check(
            "init-error",
            "an init that fails is reported, with errorType and errorMessage",
            "clients and logs show only what is posted to /runtime/init/error",
            reports_a_failed_init,
        ),
        Check(
            "snapshot",
            "with SnapStart it answers after a restore",
            "a failing restore hook fails every environment started from the snapshot",
            goes_on_from_a_snapshot,
        ),
        Check(
            "invocations",
            "successive events are answered",
            "an environment serves many invocations; a restart reloads the models",
            answers,
        ),
        Check(
            "http",
            "a function URL's event is answered with statusCode and body",
            "API Gateway and function URLs answer anything else with 502",
            answers_http,
        ),
        Check(
            "stream",
            "an answer of several parts is streamed, with its head before the first part",
            "a function URL with a response stream sends the client whatever is not in this form as it is",
            streams,
        ),
        *generation_checks(chat_path, send_by_url, metrics=None),
        Check(
            "bad-event",
            "an invalid event is answered by an error with errorType and errorMessage, or by a result",
            "clients see only these fields (X-Amz-Function-Error)",
            tells_errors,
        ),
        Check(
            "largest-event",
            "an event of 6 MB does not break the function",
            "this is the limit of a synchronous invocation",
            takes_the_largest_event,
        ),
        Check(
            "answer-size",
            f"answers have at most {ANSWER_BYTES} bytes; the function itself refuses longer ones",
            "Lambda replaces them by Function.ResponseSizeTooLarge, which does not describe the request",
            keeps_answers_short,
        ),
        Check(
            "deadline",
            "an invocation that would exceed Lambda-Runtime-Deadline-Ms is aborted before it",
            "at the deadline Lambda kills the process, and the models must be reloaded",
            keeps_deadlines,
        ),
        Check(
            "freeze",
            "an event after a freeze is answered",
            "between invocations the environment is frozen: clocks jump, background threads stand still",
            survives_freezes,
        ),
        Check(
            "one-at-a-time",
            "it asks for the next event after it has answered the last",
            "the API refuses an earlier poll, and most clients then exit",
            takes_one_at_a_time,
        ),
        Check(
            "request-ids",
            "each reply has the id of its event",
            "a reply with another id is refused, and the client waits until its timeout",
            answers_what_it_was_given,
        ),
        Check(
            "model-read-only",
            "the models' folder is not modified",
            "the function's folder is read-only: only /tmp is writable",
            any_container.leaves_the_model_alone,
        ),
        Check(
            "sigterm-exit",
            "it exits within 2 s of SIGTERM",
            "functions with extensions get it before SIGKILL, 2 s later at most",
            ends_at_sigterm,
        ),
    ),
)
