"""AWS Lambda's side: the Runtime API that a function asks for events, its init phase, limits, deadlines and freezes.

The command is a runtime's client with its handler, such as ``python -m awslambdaric FILE.handler``. Figures are those
of the Lambda developer guide (runtime environment, quotas) and of the Runtime API.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from remora_adapters.emulate import Check, EmulateSettings, Failed, Launch, Platform, Probe, Skipped
from remora_adapters.emulate import container as any_container
from remora_adapters.emulate.lambda_runtime import ANSWER_BYTES, PAYLOAD_BYTES, READY, RuntimeApi, RuntimeReply
from remora_adapters.emulate.process import Process
from remora_adapters.emulate.stage import Stage

INIT_S = 10.0
TIMEOUT_S = 30.0
SHORT_S = 2.0
FREEZE_S = 2.0
GRACE_S = 2.0
_AGAIN_S = 60.0
_LOOK_S = 0.02


def launch(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """A runtime's variables; the models lie in ``models`` of the function's folder.

    Raises ValueError for a URL: it is the function that calls, and it is told whom when it starts.
    """
    if settings.url:
        raise ValueError("a function calls Lambda, and not the other way round: give the command that starts it")
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
    """What the function calls."""
    return RuntimeApi(launched.port)


def api_of(stage: Stage) -> RuntimeApi:
    """The API that the function of this stage calls."""
    assert isinstance(stage.callee, RuntimeApi)
    return stage.callee


def invoke(stage: Stage, event: bytes, timeout_s: float = TIMEOUT_S) -> RuntimeReply:
    """The function's reply to an event. Raises Failed when it ends instead, or lets its time run out.

    It is told the platform's time, however patient we are.
    """
    return _invoke(api_of(stage), stage.process, event, timeout_s, _spare_s(stage, timeout_s))


def _invoke(api: RuntimeApi, process: Process, event: bytes, timeout_s: float, spare_s: float) -> RuntimeReply:
    invocation = api.hand_over(event, timeout_s)
    try:
        while not invocation.done.wait(_LOOK_S):
            if not process.running and not invocation.done.is_set():
                raise Failed(f"the process ended instead of answering: {process.last_words()}")
            if time.time() > invocation.deadline + spare_s:
                raise Failed(f"no reply within the {timeout_s:g} s of the invocation")
    finally:
        api.drop(invocation)
    assert invocation.reply is not None
    return invocation.reply


def _spare_s(stage: Stage, timeout_s: float) -> float:
    """How much later than at its deadline the reply to an event may come."""
    return stage.limit_s(timeout_s) - timeout_s


def must_answer(reply: RuntimeReply, what: str) -> RuntimeReply:
    """The reply, which must be no error. Raises Failed."""
    if reply.error:
        raise Failed(f"{what} got {reply.shown}")
    return reply


def must_be_told(body: bytes, what: str) -> None:
    """An error must say what it is. Raises Failed."""
    try:
        said = json.loads(body)
        told = bool(said["errorType"]) and isinstance(said["errorMessage"], str)
    except (ValueError, KeyError, TypeError):
        told = False
    if not told:
        said = body[:120].decode("utf-8", "replace")
        raise Failed(f"{what}: the error has no errorType and errorMessage, but is {said!r}")


# -- the init phase -------------------------------------------------------------------------------------------------


def starts(stage: Stage) -> None:
    if stage.ready or stage.process.running:
        return
    said = api_of(stage).init_error
    told = f"reported {said.decode('utf-8', 'replace')!r}" if said else "reported nothing"
    raise Failed(f"the process ended in its init phase, and {told}: {stage.process.last_words()}")


def asks_in_time(stage: Stage) -> None:
    if stage.ready:
        return
    if not stage.process.running:
        raise Skipped("it ended: see starts")
    raise Failed(f"it did not ask for an event within {stage.settings.startup_s or stage.limit_s(INIT_S):g} s")


def reports_a_failed_init(stage: Stage) -> None:
    """Starts the command once more, with an empty folder for its code and models."""
    if stage.settings.model is None:
        raise Skipped("needs the models' folder, to take it away: --model DIR")
    empty = stage.mounts / "empty"
    empty.mkdir()
    with _begun_again(stage, "failed-init.txt", LAMBDA_TASK_ROOT=str(empty)) as (api, process):
        if api.asked.is_set():
            raise Skipped("it starts without models as well")
        if process.running:
            raise Failed(f"without models it neither started nor ended within {_AGAIN_S:g} s")
        if api.init_error is None:
            raise Failed(f"without models it ended and reported nothing: {process.last_words()}")
        must_be_told(api.init_error, "an init without models")


@contextmanager
def _begun_again(stage: Stage, log: str, **environ: str) -> Iterator[tuple[RuntimeApi, Process]]:
    """The command once more, with an API and variables of its own, when it asks for an event, has ended, or hangs."""
    with RuntimeApi(0) as api:
        given = {**stage.environ, "AWS_LAMBDA_RUNTIME_API": api.address, **environ}
        process = Process(stage.settings.command, given, stage.mounts / log)
        try:
            end = time.monotonic() + _AGAIN_S
            while process.running and not api.asked.is_set() and time.monotonic() < end:
                time.sleep(_LOOK_S)
            yield api, process
        finally:
            process.kill()


def goes_on_from_a_snapshot(stage: Stage) -> None:
    """Starts the command once more as SnapStart does, which copies it between its init phase and its first event."""
    with _begun_again(stage, "snapshot.txt", AWS_LAMBDA_INITIALIZATION_TYPE="snap-start") as (api, process):
        if not api.restored.is_set() and api.asked.is_set():
            raise Skipped("its runtime's client takes no part in snapshots")
        if api.restore_error is not None:
            raise Failed(f"it could not go on from its snapshot: {api.restore_error[:300].decode('utf-8', 'replace')}")
        if not api.asked.is_set():
            raise Failed(f"it did not ask for an event: {process.last_words()}")
        must_answer(
            _invoke(api, process, stage.body, TIMEOUT_S, _spare_s(stage, TIMEOUT_S)), "the first event after a snapshot"
        )


# -- invocations ----------------------------------------------------------------------------------------------------


def answers(stage: Stage) -> None:
    for count in ("first", "second"):
        must_answer(invoke(stage, stage.body), f"the {count} event")


def answers_http(stage: Stage) -> None:
    """The request as a function URL makes an event of it (payload format 2.0)."""
    path = stage.settings.given.get("path")
    if path is None:
        raise Skipped("needs the path that the request goes to: --with path=PATH")
    event = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": "",
        "headers": {"content-type": stage.settings.content_type, "host": "emulated.lambda-url.eu-central-1.on.aws"},
        "requestContext": {
            "stage": "$default",
            "domainName": "emulated.lambda-url.eu-central-1.on.aws",
            "http": {"method": "POST", "path": path, "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1", "userAgent": "x"},
        },
        "body": stage.body.decode(),
        "isBase64Encoded": False,
    }
    reply = must_answer(invoke(stage, json.dumps(event).encode()), "a function URL's event")
    try:
        said = json.loads(reply.body)
        good = isinstance(said["statusCode"], int) and isinstance(said.get("body", ""), str)
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise Failed(f"a function URL's event got {reply.shown}: expected statusCode, a number, and body, a text")
    if not 200 <= said["statusCode"] < 300:
        raise Failed(f"a function URL's event got {reply.shown}")


def tells_errors(stage: Stage) -> None:
    for event in (b"null", b'{"unheard-of": [1, 2]}', b'"text"'):
        reply = invoke(stage, event)
        if reply.error:
            must_be_told(reply.body, f"the event {event.decode()}")
    must_answer(invoke(stage, stage.body), "a good event after bad ones")


def takes_the_largest_event(stage: Stage) -> None:
    reply = invoke(stage, b'"%b"' % (b"x" * (PAYLOAD_BYTES - 2)))
    if reply.error:
        must_be_told(reply.body, f"an event of {PAYLOAD_BYTES} bytes")
    must_answer(invoke(stage, stage.body), "a good event after one of the largest size")


def keeps_answers_short(stage: Stage) -> None:
    path = stage.settings.given.get("large-body")
    if path is None:
        raise Skipped(f"needs an event whose answer is longer than {ANSWER_BYTES} bytes: --with large-body=FILE")
    invoke(stage, Path(path).read_bytes())
    if api_of(stage).longest > ANSWER_BYTES:
        raise Failed(f"it sent an answer of {api_of(stage).longest} bytes")


def keeps_deadlines(stage: Stage) -> None:
    path = stage.settings.given.get("slow-body")
    if path is None:
        raise Skipped(f"needs an event that takes longer than {SHORT_S:g} s: --with slow-body=FILE")
    reply = invoke(stage, Path(path).read_bytes(), SHORT_S)
    if reply.late_s > _spare_s(stage, SHORT_S):
        raise Failed(f"the reply came {reply.late_s:.2f} s after the invocation's end")


def survives_freezes(stage: Stage) -> None:
    """All its processes stand still while it waits for an event, as between two invocations."""
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
    early = api_of(stage).early
    if early:
        raise Failed(f"it asked {early} times for the next event before it had answered the last")


def answers_what_it_was_given(stage: Stage) -> None:
    strays = api_of(stage).strays
    if strays:
        raise Failed(f"it answered {len(strays)} events that it did not have, such as {strays[0][:60]!r}")


def ends_at_sigterm(stage: Stage) -> None:
    """Functions with extensions get SIGTERM; its status does not matter."""
    stage.process.terminate()
    if stage.process.wait(stage.grace_s).killed:
        raise Failed(f"it was still there {stage.grace_s:g} s after SIGTERM")


PLATFORM = Platform(
    title="lambda",
    launch=launch,
    probe=Probe(READY, 5.0, 0.02, INIT_S),
    grace_s=GRACE_S,
    callee=runtime_api,
    checks=(
        Check(
            "starts",
            "the process lives through its init phase",
            "a function that ends there fails every invocation with Runtime.ExitError, and pays for its init each time",
            starts,
            True,
        ),
        Check(
            "init",
            "it asks for its first event within 10 s",
            "after 10 s the init starts over inside the first invocation, whose timeout then covers it",
            asks_in_time,
            True,
        ),
        Check(
            "init-error",
            "an init that fails is reported, with errorType and errorMessage",
            "clients and logs see no more of it than what is posted to /runtime/init/error",
            reports_a_failed_init,
        ),
        Check(
            "snapshot",
            "with SnapStart it goes on from a snapshot, and answers",
            "a hook that fails there fails every environment that begins from the snapshot",
            goes_on_from_a_snapshot,
        ),
        Check(
            "invocations",
            "events are answered, one after the other",
            "an environment lives for many invocations; one that ends loses its models",
            answers,
        ),
        Check(
            "http",
            "a function URL's event is answered with statusCode and body",
            "API Gateway and function URLs make a 502 of anything else",
            answers_http,
        ),
        Check(
            "bad-event",
            "an event that cannot be read is an error with errorType and errorMessage, or an answer",
            "that is all a client sees of it (X-Amz-Function-Error); events come from anywhere",
            tells_errors,
        ),
        Check(
            "largest-event",
            "an event of 6 MB does no harm",
            "that is what a synchronous invocation lets through",
            takes_the_largest_event,
        ),
        Check(
            "answer-size",
            f"answers have at most {ANSWER_BYTES} bytes; longer ones are refused by the function itself",
            "Lambda replaces them by Function.ResponseSizeTooLarge, which says nothing of the request",
            keeps_answers_short,
        ),
        Check(
            "deadline",
            "an invocation that runs out of time is given up before Lambda-Runtime-Deadline-Ms",
            "at the deadline Lambda ends the process, and the models are loaded again",
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
            "the API refuses it, and most clients end with that",
            takes_one_at_a_time,
        ),
        Check(
            "request-ids",
            "each reply names the event that it is for",
            "a reply to another one is refused, and the client waits until its timeout",
            answers_what_it_was_given,
        ),
        Check(
            "model-read-only",
            "nothing under the models' folder is written",
            "the function's folder is read-only: only /tmp takes files",
            any_container.leaves_the_model_alone,
        ),
        Check(
            "sigterm-exit",
            "it ends within 2 s of SIGTERM",
            "functions with extensions get it before SIGKILL, 2 s later at most",
            ends_at_sigterm,
        ),
    ),
)
