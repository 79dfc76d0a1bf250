"""AWS Lambda host, which loads models in the init phase and answers one event at a time.

The function's handler is ``remora_adapters.aws_lambda.handler``. An event that carries an HTTP request (API Gateway,
function URL, load balancer) is answered by the ASGI app through mangum. Every other event is a V2 request as plain JSON
and goes to the engine without an event loop.

    python -m remora_adapters.aws_lambda      an image's entry point, with awslambdaric installed

With ``REMORA_RESPONSE_MODE=stream`` this entry point sends the answers to HTTP events piece by piece (see `streaming`),
for function URLs and REST APIs that invoke the function with a response stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import orjson

from remora.api.http import HEADER as DEADLINE_HEADER
from remora.api.http import InferCodec, Receive, ReplyFormat, RequestLimits, Scope, Send, V2App
from remora.api.models import Arrival
from remora.engine import Engine, FrontEnd
from remora.errors import InvalidArgumentError, RemoraError, UnavailableError, UnsupportedError
from remora.messages import Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.options import EngineOptions, ServerOptions
from remora.protocols.rest.answer import Refusal
from remora.system.install_advice import install_command
from remora.system.json_text import read_json

_log = logging.getLogger("remora.lambda")

PAYLOAD_LIMIT = 6_291_556
"""Limit of a function's answer, in bytes of JSON."""
_WORST_GROWTH = 6
"""Maximum of JSON bytes per byte of text."""
_MARGIN_MS = 250
"""Time before the deadline at which an invocation is aborted, to avoid losing the models."""
_TELEMETRY = ("opentelemetry.trace", "opentelemetry.metrics", "opentelemetry._logs")
_PROVIDERS = ("get_tracer_provider", "get_meter_provider", "get_logger_provider")
_FLUSH_MS = 2_000
_MB_PER_PROCESSOR = 1_769
"""Memory of a function that corresponds to one processor."""
_GENERATORS = ("random", "numpy.random", "torch")
_SEGMENT_HEADER = b"x-amzn-trace-id"

Event = dict[str, Any]


class LambdaContext(Protocol):
    """Lambda's context of an invocation, as far as used here."""

    def get_remaining_time_in_millis(self) -> int:
        """Return the milliseconds until the invocation's deadline."""


class Settings(NamedTuple):
    """Settings from the function's environment.

    Attributes:
        engine: engine options. The models are at ``REMORA_MODEL_REPOSITORY``, a folder or a URL; else in ``models``
            beside the function's code or in a layer (``/opt/models``). Python models run in threads, because workers
            would be frozen between events. Batchers do not wait, because there is one request at a time.
            ``REMORA_TRACE_CONFIG`` has entries of ``--trace-config`` separated by spaces, and
            ``REMORA_METRICS_EXPORT`` those of ``--metrics-export``.
        server: limits of HTTP requests, and ``REMORA_API_KEYS_FILE``, the API keys that HTTP requests need. Direct
            invocations need none, because IAM decides about them.
        base_path: ``REMORA_BASE_PATH``, the path prefix of a custom domain. A stage's name comes from the event and
            needs no setting.
    """

    engine: EngineOptions
    server: ServerOptions
    base_path: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings of an environment. Raises ValueError without models."""
        named = environ.get("REMORA_MODEL_REPOSITORY", "")
        places = [named] if named else [f"{environ.get('LAMBDA_TASK_ROOT', '/var/task')}/models", "/opt/models"]
        models = next((place for place in places if "://" in place or Path(place).exists()), None)
        if models is None:
            raise ValueError(
                f"there are no models in {' or '.join(places)}: copy them there, or set "
                "REMORA_MODEL_REPOSITORY to their folder"
            )
        engine = EngineOptions(
            paths=(models,),
            batching_delay=False,
            backend_config=("python,isolation=thread",),
            exit_timeout_secs=1,
            trace_config=tuple(environ.get("REMORA_TRACE_CONFIG", "").split()),
            metrics_export=tuple(environ.get("REMORA_METRICS_EXPORT", "").split()),
            metrics_export_secs=0.0,  # the environment is frozen between events; each one ends with an export
        )
        base_path = environ.get("REMORA_BASE_PATH", "").strip("/")
        server = ServerOptions(api_keys_file=environ.get("REMORA_API_KEYS_FILE", ""))
        return cls(engine, server, f"/{base_path}" if base_path else "")


class Function:
    """Handler of events, one at a time.

    Args:
        engine: a started engine, which the function owns.
        settings: settings of the environment.
        flush: called after each event, before the environment may be frozen.

    Raises ValueError for invalid API keys.
    """

    def __init__(self, engine: Engine, settings: Settings, flush: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._settings = settings
        self._flush = flush or flush_telemetry
        self._codec = InferCodec(
            RequestLimits(settings.server.http_max_input_size, settings.server.http_max_json_depth)
        )
        self._app = HttpApp(engine, settings)
        self._http: _Mangum | None = None

    def __call__(self, event: object, context: LambdaContext) -> Event:
        """Return the answer to an event as a JSON object.

        An HTTP request's failure is an HTTP answer. A direct invocation's failure is raised as RemoraError, which
        Lambda reports as a function error with the error's class and text.
        """
        try:
            if isinstance(event, dict) and "requestContext" in event:
                return self._answer_http(event, context)
            return self._answer_direct(event, context)
        finally:
            self._engine.flush(_FLUSH_MS / 1e3)
            self._flush()

    def stream(self, event: Event, context: LambdaContext, send: Send) -> None:
        """Answer an HTTP request by messages of ASGI. Raises InvalidArgumentError for another event."""
        try:
            self._adapter().stream(event, context, send)
        finally:
            self._engine.flush(_FLUSH_MS / 1e3)
            self._flush()

    def prepare(self) -> None:
        """Initialize HTTP, if mangum is installed, so that a snapshot contains it."""
        with suppress(UnsupportedError):
            self._adapter()

    def close(self) -> None:
        """Stop the engine, for programs and tests, because Lambda just ends the process."""
        if self._http is not None:
            self._http.close()
        self._engine.stop()

    # -- HTTP -------------------------------------------------------------------------------------------------------

    def _adapter(self) -> _Mangum:
        if self._http is None:
            self._http = _Mangum(self._app)
        return self._http

    def _answer_http(self, event: Event, context: LambdaContext) -> Event:
        answer = self._adapter()(event, context)
        size = _size(answer, len(answer.get("body") or ""))
        if size <= PAYLOAD_LIMIT:
            return answer
        body = orjson.dumps({"error": _too_long(size)}).decode()
        kept = {key: value for key, value in answer.items() if key not in ("headers", "multiValueHeaders", "cookies")}
        headers = {"content-type": "application/json"}
        if "multiValueHeaders" in answer:
            kept["multiValueHeaders"] = {name: [value] for name, value in headers.items()}
        if "headers" in answer:
            kept["headers"] = headers
        return {**kept, "statusCode": 413, "body": body, "isBase64Encoded": False}

    # -- direct invocations -----------------------------------------------------------------------------------------

    def _answer_direct(self, event: object, context: LambdaContext) -> Event:
        """Answer a V2 request.

        ``model_name`` is optional for a single model, and ``model_version`` always."""
        if not isinstance(event, dict) or "inputs" not in event:
            raise InvalidArgumentError(
                "this event is neither an HTTP request nor a V2 request: send "
                '{"model_name": ..., "inputs": [{"name", "shape", "datatype", "data"}]}, or call through API Gateway, '
                "a function URL or a load balancer"
            )
        event = dict(event)
        name, version = self._target(event.pop("model_name", ""), event.pop("model_version", ""))
        answered: Future[tuple[ServedModel, ReplyFormat, Outcome]] = Future()
        refusal = f"model '{name}' gives any number of answers: only generate can return them here"
        ticket = self._engine.submit_to(FrontEnd(self._submit, _arrival, refusal), name, version, event, answered)
        assert ticket is not None
        model, reply, outcome = _wait(answered, ticket, context)
        response = _response_of(outcome)
        answer = self._codec.encode(model.name, model.version_text, ticket.request.form, response, reply)
        body = b"".join(answer.body)
        found: Event = read_json(body.decode("utf-8", "replace"))  # json.loads accepts NaN and Infinity
        if answer.status != 200:
            raise UnsupportedError(str(found["error"]))
        size = _size(found, len(body))
        if size > PAYLOAD_LIMIT:
            raise UnavailableError(_too_long(size))
        return found

    def _submit(
        self, model: ServedModel, event: Event, answered: Future[tuple[ServedModel, ReplyFormat, Outcome]]
    ) -> Ticket:
        """Decode a direct invocation for ``model`` and submit it. Raises RemoraError."""
        try:
            form, data, reply = self._codec.decode(orjson.dumps(event), None, model=model.name)
        except Refusal as refusal:
            raise InvalidArgumentError(refusal.message) from refusal
        except orjson.JSONEncodeError as error:
            raise InvalidArgumentError(f"the event is not plain JSON: {error}") from error
        if reply.default or any(reply.listed.values()):
            raise UnsupportedError(
                "a direct invocation is answered in JSON: ask for no binary outputs here, or send the request as HTTP "
                "through a function URL"
            )
        return model.submit(form, data, lambda _, outcome: answered.set_result((model, reply, outcome)))

    def _target(self, name: object, version: object) -> tuple[str, int]:
        """Return the model and version that an event names. Raises InvalidArgumentError."""
        if not isinstance(name, str) or not isinstance(version, (str, int)):
            raise InvalidArgumentError("model_name is text, and model_version a number or its text")
        name = name or self._engine.only_model()
        if not name:
            names = {model.name for model in self._engine.models()}
            raise InvalidArgumentError(f"no model_name: expected one of {', '.join(sorted(names)) or 'none'}")
        text = str(version) or "-1"
        if not text.removeprefix("-").isdecimal() or len(text) > 19:
            raise InvalidArgumentError(f"model_version '{text[:40]}' is not a number")
        return name, int(text)


def _arrival(*_: object) -> Arrival:
    return Arrival("", _segment)


def _wait(
    done: Future[tuple[ServedModel, ReplyFormat, Outcome]], ticket: Ticket, context: LambdaContext
) -> tuple[ServedModel, ReplyFormat, Outcome]:
    """Wait for the outcome. Raises UnavailableError and cancels shortly before the deadline."""
    left_ms = context.get_remaining_time_in_millis() - _MARGIN_MS
    try:
        return done.result(max(left_ms, 1) / 1e3)
    except TimeoutError:
        ticket.cancel()
        raise UnavailableError(
            f"the model did not answer within {left_ms} ms, and the invocation ends in {_MARGIN_MS}: give the function "
            "a longer timeout or more memory, which also gives it more processors"
        ) from None


def _response_of(outcome: Outcome) -> Response:
    if isinstance(outcome, RemoraError):
        raise outcome
    if not isinstance(outcome, Response):
        raise UnsupportedError("the model gave more than one answer")
    return outcome


def _size(answer: Event, length: int) -> int:
    """Return the size of an answer whose longest text has ``length`` bytes, or an upper bound.

    Lambda's runtime writes JSON in ASCII, except in AWS's newest images.
    """
    bound = length * _WORST_GROWTH + 65_536
    return bound if bound <= PAYLOAD_LIMIT else len(json.dumps(answer))


def _too_long(size: int) -> str:
    return (
        f"the answer is {size} bytes of JSON, and Lambda takes {PAYLOAD_LIMIT} from a function: ask for fewer rows or "
        "outputs; binary tensors count four thirds of their size, and numbers in JSON several times theirs"
    )


# -- HTTP events through mangum -------------------------------------------------------------------------------------


class HttpApp:
    """ASGI app of V2 and the pages for mangum, with the event's base path and deadline."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._settings = settings
        self._v2 = V2App(engine, settings.server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of mangum's, whose scope also has the event and its context."""
        scope["root_path"] = base_path_of(scope["aws.event"], scope["path"], self._settings.base_path)
        await self._v2(_with_segment(_with_deadline(scope)), receive, send)


def base_path_of(event: Event, path: str, configured: str) -> str:
    """Return the path prefix, the configured one or the stage of an HTTP API, or "".

    A REST API's events have paths without the stage; an HTTP API's (payload 1.0 and 2.0) include it, except $default.
    """
    stage = str(event["requestContext"].get("stage") or "")
    staged = f"/{stage}" if "version" in event and stage not in ("", "$default") else ""
    for base in (staged + configured, configured, staged):
        if base and path.startswith(f"{base}/"):
            return base
    return ""


def _with_deadline(scope: Scope) -> Scope:
    """Return the scope with the remaining time as deadline, unless the client has set one."""
    if any(name.lower() == DEADLINE_HEADER for name, _ in scope["headers"]):
        return scope
    left_ms = max(scope["aws.context"].get_remaining_time_in_millis() - _MARGIN_MS, 1)
    scope["headers"] = [*scope["headers"], (DEADLINE_HEADER, b"%d" % left_ms)]
    return scope


def _with_segment(scope: Scope) -> Scope:
    """Return the scope with the X-Ray segment as parent, unless the client has sent one."""
    segment = _segment(_SEGMENT_HEADER)
    if segment is None or any(name.lower() == b"traceparent" for name, _ in scope["headers"]):
        return scope
    kept = [(name, value) for name, value in scope["headers"] if name.lower() != _SEGMENT_HEADER]
    scope["headers"] = [*kept, (_SEGMENT_HEADER, segment)]
    return scope


def _segment(name: bytes) -> bytes | None:
    """Return the header of the invocation's segment, which the runtime sets per invocation.

    An unsampled segment is ignored, because functions have one while active tracing is off.
    """
    value = os.environ.get("_X_AMZN_TRACE_ID", "")
    return value.encode("latin-1", "replace") if "Sampled=1" in value and name == _SEGMENT_HEADER else None


class _Mangum:
    """Adapter around mangum with lifespan off, because it would restart the app for each event."""

    def __init__(self, app: HttpApp) -> None:
        try:
            from mangum import Mangum
        except ImportError as error:
            raise UnsupportedError(f"HTTP events need mangum: {install_command('lambda')}") from error
        self._runner = asyncio.Runner()
        self._enter_loop()
        self._app = app
        self._adapter: Any = Mangum(cast(Any, app), lifespan="off")

    def __call__(self, event: Event, context: LambdaContext) -> Event:
        """Return the answer to an HTTP event. Raises InvalidArgumentError for any other event."""
        self._enter_loop()
        try:
            return dict(self._adapter(event, context))
        except Exception as error:
            raise _no_http(error) from error

    def stream(self, event: Event, context: LambdaContext, send: Send) -> None:
        """Answer an HTTP event by messages. Raises InvalidArgumentError for any other event."""
        self._enter_loop()
        try:
            request = self._adapter.infer(event, context)
            scope, body = request.scope, request.body
        except Exception as error:
            raise _no_http(error) from error
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for message in messages:
                return message
            return await asyncio.Event().wait()  # Lambda does not report that a client has gone

        self._runner.run(self._app(scope, receive, send))

    def _enter_loop(self) -> None:
        """Set the adapter's event loop as the thread's, because mangum uses that."""
        asyncio.set_event_loop(self._runner.get_loop())

    def close(self) -> None:
        self._runner.close()


def _no_http(error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"this event has a requestContext, but is not an HTTP request of API Gateway, a function URL or a load "
        f"balancer: {type(error).__name__}: {error}"
    )


# -- the process ----------------------------------------------------------------------------------------------------


def flush_telemetry(modules: Mapping[str, Any] | None = None) -> None:
    """Flush OpenTelemetry's providers, because a frozen environment sends nothing.

    ``modules`` is ``sys.modules`` except in tests. Takes at most 2 s per provider; never raises.
    """
    loaded = sys.modules if modules is None else modules
    for name, getter in zip(_TELEMETRY, _PROVIDERS, strict=True):
        if name not in loaded:
            continue
        try:
            flush = getattr(getattr(loaded[name], getter)(), "force_flush", None)
            if flush is not None:
                flush(_FLUSH_MS)
        except Exception as error:
            _log.warning("telemetry could not be sent: %s", error)


def load(environ: MutableMapping[str, str]) -> Function:
    """Return the function with loaded models.

    Raises ValueError or RemoraError, an init error in Lambda.
    """
    from remora.api.system import tuning

    tuning.apply(tuning.Tuning(), environ)
    settings = Settings.of(environ)
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # then threads use all visible processors
            os.sched_setaffinity(0, own_processors(environ, os.sched_getaffinity(0)))
    engine = Engine(options=settings.engine).start()
    tuning.freeze(tuning.Tuning())
    function = Function(engine, settings)
    if environ.get("AWS_LAMBDA_INITIALIZATION_TYPE") == "snap-start":
        _take_part_in_snapshots(function)
    return function


def own_processors(environ: Mapping[str, str], seen: Collection[int]) -> set[int]:
    """Return the visible processors that the function's memory pays for.

    A function sees two even with half of one's time, and threads on both would wait for each other.
    """
    memory = environ.get("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "")
    if not (memory.isascii() and memory.isdigit() and len(memory) < 10):
        return set(seen)
    return set(sorted(seen)[: max(-(-int(memory) // _MB_PER_PROCESSOR), 1)])


def _take_part_in_snapshots(function: Function) -> None:
    """Register hooks of SnapStart, which snapshots this process after its init phase."""
    try:
        from snapshot_restore_py import register_after_restore, register_before_snapshot
    except ImportError:  # it belongs to AWS's client, which runs the hooks
        _log.warning("this runtime has no hooks for snapshots: environments will draw the same random numbers")
        return
    register_before_snapshot(function.prepare)
    register_after_restore(renew_randomness)


def renew_randomness(modules: Mapping[str, Any] | None = None) -> None:
    """Reseed shared random generators, so that copies of a snapshot differ.

    This changes trace ids and the numbers that models draw from shared generators. A model must reseed generators that
    it created. ``modules`` is ``sys.modules`` except in tests.
    """
    loaded = sys.modules if modules is None else modules
    for name in _GENERATORS:
        if name in loaded:
            loaded[name].seed()


def __getattr__(name: str) -> Function:
    """Create ``handler`` when Lambda's runtime first reads it, in the init phase."""
    if name != "handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = globals()["handler"] = load(os.environ)
    return function


def main() -> int:
    """Run the function with AWS's runtime client, or stream, until the environment ends."""
    mode = os.environ.get("REMORA_RESPONSE_MODE", "") or "buffered"
    if "AWS_LAMBDA_RUNTIME_API" not in os.environ:
        print("this is an entry point for AWS Lambda: AWS_LAMBDA_RUNTIME_API is not set", file=sys.stderr)
        return 2
    if mode not in ("buffered", "stream"):
        print(f"REMORA_RESPONSE_MODE={mode}: expected buffered or stream", file=sys.stderr)
        return 2
    if mode == "stream":
        return _stream(os.environ)
    try:
        from awslambdaric.__main__ import main as run
    except ImportError:
        print("running a function needs AWS's runtime client: pip install awslambdaric", file=sys.stderr)
        return 2
    run([sys.argv[0], "remora_adapters.aws_lambda.handler"])
    return 0


def _stream(environ: MutableMapping[str, str]) -> int:
    """Load the models and answer events with streams until the environment ends."""
    from remora_adapters.aws_lambda import streaming

    client = streaming.RuntimeClient(environ["AWS_LAMBDA_RUNTIME_API"])
    try:
        function = load(environ)
        function.prepare()
    except Exception as error:
        client.fail_init(error)
        raise
    try:
        streaming.run(client, cast(Any, function), function.stream)
    except OSError as error:
        _log.info("the environment ends: %s", error)
    return 0
