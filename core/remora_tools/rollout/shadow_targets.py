"""Destinations of copied requests, and functions that compare answers.

Addresses and functions come from the server's options only. Clients and commands name them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

import numpy as np

from remora.api.models import ModelTable
from remora.api.storage import name_of
from remora.api.system import SHADOW_PROCESSORS
from remora.errors import ConfigError, InternalError, NotFoundError, RemoraError, UnavailableError
from remora.messages import Data, InferForm, Outcome, Parameter, Response, Tensor, Ticket, split_outcome
from remora.models.served_model import ServedModel
from remora.options import EngineOptions
from remora.system.clock import Clock
from remora.traffic.releases import HUNDRED, Shadow
from remora_tools.rollout.comparing import Comparison, Outputs, difference
from remora_tools.rollout.differences import DifferenceLog, open_differences
from remora_tools.rollout.recordings import MAX_ANSWERS, MAX_BYTES, bytes_of, copied_outputs
from remora_tools.rollout.routing import COPY_HEADER, RoutedModel
from remora_tools.rollout.shadowing import Answered, Compare, Primary, Shadowing, Target
from remora_tools.traffic.captured import CapturedError, CapturedTensor, Exchange, answer_of, printed, request_of
from remora_tools.traffic.line_file import content_of, parameters_of, redactions_of

TIMEOUT_S, MODEL_TIMEOUT_S = 10.0, 60.0
_MOST_BYTES = 256 << 20
_HEADER_LENGTH = "inference-header-content-length"
_REFUSALS = frozenset((400, 415, 422, 500, 501))
"""Statuses of servers that do not understand binary tensors."""
_THREADS = 4
"""Threads of another server, each with a connection."""


class ShadowSettings(NamedTuple):
    """Destinations and comparisons of the options, by name.

    Attributes:
        urls: addresses of other servers.
        functions: functions that compare answers.
        log: keeps differences; None without.
        processors: that copies may use on average.
    """

    urls: Mapping[str, str] = {}
    functions: Mapping[str, Compare] = {}
    log: DifferenceLog | None = None
    processors: float = SHADOW_PROCESSORS

    def close(self) -> None:
        """Close the log of differences."""
        if self.log is not None:
            self.log.close()

    def check(self, shadow: Shadow) -> None:
        """Raise ValueError for a name that no option defines."""
        _named(self.urls, shadow.url, "--shadow-url")
        _named(self.functions, shadow.compare, "--shadow-compare")


def shadow_settings(options: EngineOptions, clock: Clock) -> ShadowSettings:
    """Return the settings of options. Raises ConfigError."""
    if not 0 < options.shadow_processors <= 1:
        raise ConfigError(f"--shadow-processors={options.shadow_processors:g}: expected a number above 0 to 1")
    urls = {}
    for entry in options.shadow_url:
        name, url = _pair("--shadow-url", entry, "NAME=URL")
        urls[name] = _checked(name, url)
    functions = {}
    for entry in options.shadow_compare:
        name, place = _pair("--shadow-compare", entry, "NAME=FILE:FUNCTION")
        functions[name] = load_function(place)
    log = open_differences(
        options.shadow_differences,
        options.shadow_differences_max_bytes,
        redactions_of(options.capture_redact),
        clock,
    )
    return ShadowSettings(urls, functions, log, options.shadow_processors)


def target_of(shadow: Shadow, key: str, table: ModelTable, settings: ShadowSettings, clock: Clock) -> Target:
    """Return the destination of a model's shadow. Raises ValueError for an unknown name."""
    if shadow.url:
        settings.check(shadow)
        return OtherServer(settings.urls[shadow.url], shadow.model or name_of(key), shadow.version)
    if shadow.model:
        return OtherModel(lambda: table.resolve(shadow.model, shadow.version or -1), clock)
    return OtherModel(lambda: _ready(table, key, shadow.version), clock)


def compare_of(shadow: Shadow, settings: ShadowSettings) -> Compare:
    """Return the comparison of a shadow. Raises ValueError for an unknown name."""
    if not shadow.compare:
        return partial(difference, how=Comparison(shadow.tolerance, shadow.top_k))
    settings.check(shadow)
    return settings.functions[shadow.compare]


def make_shadowing(shadow: Shadow, key: str, table: ModelTable, settings: ShadowSettings, clock: Clock) -> Shadowing:
    """Return the runner of copies to a model's shadow. Raises ValueError for an unknown name."""
    primary = Primary(
        partial(_is_busy, table, key),
        partial(_answered_count, table, key),
        shadow.weight / HUNDRED,
        settings.processors,
        partial(table.reroute, key),
    )
    log = None if settings.log is None else settings.log.put
    target = target_of(shadow, key, table, settings, clock)
    return Shadowing(target, compare_of(shadow, settings), primary, clock, log, shadow.title)


def _is_busy(table: ModelTable, key: str) -> bool:
    return any(model.scheduler.pending or model.scheduler.running for model in table.serving(key).values())


def _answered_count(table: ModelTable, key: str) -> int:
    """Return how many requests the version that stands for a model has answered."""
    primary = table.newest(key)
    if primary is None:
        return 0
    stats = primary.stats()
    return stats.success.count + stats.fail.count


class OtherModel:
    """Model or version of this server, found when a copy is sent.

    Args:
        find: returns the model, or raises RemoraError.
        clock: the engine's.
        timeout_s: time without an answer after which a copy is cancelled.
    """

    threads = 1

    def __init__(self, find: Callable[[], ServedModel], clock: Clock, timeout_s: float = MODEL_TIMEOUT_S) -> None:
        self._find = find
        self._clock = clock
        self._timeout_s = timeout_s
        self._collected: _Collected | None = None
        self._closed = False

    def refusal(self, primary: ServedModel | None) -> str:
        return ""

    def answer(self, form: InferForm, data: list[Data]) -> Answered:
        model = self._find()
        if model.is_routed:  # its own release neither counts nor copies a copy
            model = cast("RoutedModel", model).bind(form)
        collected = self._collected = _Collected(self._clock)
        if self._closed:
            collected.fail(_shadow_ended())
        ticket = model.submit(form, data, collected)
        if not collected.wait(self._timeout_s):
            ticket.cancel()
        answers = collected.answers if collected.error is None else ()
        return Answered(answers, collected.cost_ns(ticket), collected.error)

    def end_thread(self) -> None:
        """Close nothing."""

    def close(self) -> None:
        self._closed = True
        if self._collected is not None:
            self._collected.fail(_shadow_ended())


def _shadow_ended() -> RemoraError:
    return UnavailableError("the shadow has ended")


class _Collected:
    """Reply that keeps the answers to one copy.

    It keeps one more than a recording, which shows that there are more.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._size = 0
        self._progress = threading.Event()
        self._is_ended = False
        self._ended_ns = 0
        self.answers: list[Sequence[Tensor]] = []
        self.error: Exception | None = None

    def __call__(self, ticket: Ticket, outcome: Outcome) -> None:
        final, content = split_outcome(outcome)
        if isinstance(content, Response):
            try:
                self._keep(content)
            except Exception as error:  # such as no memory for the copy
                self.fail(error)
        elif content is not None:
            self.fail(content)
        if final:
            self._ended_ns = self._clock.monotonic_ns()
            self._is_ended = True
        self._progress.set()

    def _keep(self, answer: Response) -> None:
        if self.error is not None or len(self.answers) > MAX_ANSWERS:
            return
        self._size += sum(bytes_of(each.data) for each in answer.outputs)
        if self._size > MAX_BYTES:
            raise UnavailableError(f"the answers have more than {MAX_BYTES} bytes")
        self.answers.append(copied_outputs(answer))  # because the memory may be freed after the reply

    def fail(self, error: Exception) -> None:
        """Give the copy up, unless it has failed before."""
        self.error = self.error or error
        self._progress.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the last answer, and return False if the copy must be cancelled."""
        while not self._is_ended:
            if self.error is not None or len(self.answers) > MAX_ANSWERS:
                return False
            if not self._progress.wait(timeout_s):
                self.fail(UnavailableError(f"no answer within {timeout_s:g} s"))
            self._progress.clear()
        return True

    def cost_ns(self, ticket: Ticket) -> int:
        """Return the time of the execution so far, as one processor."""
        ended_ns = self._ended_ns if self._is_ended else self._clock.monotonic_ns()
        return sum(ticket.spent_ns) or (ended_ns - ticket.start_ns if ticket.start_ns else 0)


class OtherServer:
    """Model of another V2 server, over HTTP with persistent connections.

    Args:
        url: ``http://HOST[:PORT][/PREFIX]`` or https.
        model: name of the model there.
        version: version there, 0 for its choice.
    """

    threads = _THREADS

    def __init__(self, url: str, model: str, version: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        self._address = (parts.scheme, parts.hostname or "", parts.port)
        self._path = f"{parts.path.rstrip('/')}/v2/models/{quote(model, safe='')}"
        if version:
            self._path += f"/versions/{version}"
        self._timeout_s = timeout_s
        self._own = threading.local()
        self._takes_binary = self._is_plain = False
        """What is known of the server: that it understands binary tensors, or that it does not."""

    def refusal(self, primary: ServedModel | None) -> str:
        if primary is not None and primary.decoupled:
            return (
                f"model '{primary.name}' is decoupled: copies of its streams can go to a version or another model of "
                "this server, and to no other server"
            )
        return ""

    def end_thread(self) -> None:
        """Close the thread's connection."""
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Leave copies in flight, which end with their timeouts and use no processor here."""

    def answer(self, form: InferForm, data: list[Data]) -> Answered:
        tensors = [
            CapturedTensor(spec.name, spec.datatype, tuple(spec.shape), content_of(spec.datatype, part))
            for spec, part in zip(form.inputs, data, strict=True)
        ]
        names = [each.name for each in form.outputs]
        parameters = parameters_of(form)
        request = request_of(Exchange("", "", "", form.id, parameters, tensors, names, (), "", 0))
        assert request is not None  # no input is redacted
        if self._is_plain:
            status, length, body = self._exchange(_as_json(form, parameters, tensors), None)
        else:
            status, length, body = self._exchange(request.body, request.header_length)
            if status in _REFUSALS and not self._takes_binary:
                again = self._exchange(_as_json(form, parameters, tensors), None)
                self._is_plain = again[0] == 200
                if self._is_plain:
                    status, length, body = again
        self._takes_binary |= status == 200 and not self._is_plain
        if status != 200:
            raise InternalError(f"HTTP status {status}: {body[:200].decode(errors='replace')}")
        try:
            return Answered([[_tensor(each) for each in answer_of(body, length)]])
        except (CapturedError, ValueError, KeyError) as error:
            raise InternalError(f"the answer is not of V2: {error}") from error

    def _exchange(self, body: bytes, header_length: int | None) -> tuple[int, int | None, bytes]:
        """Return status, length of the JSON and body of an answer. Raises UnavailableError."""
        import http.client  # because few servers copy requests to others

        scheme, host, port = self._address
        connection = getattr(self._own, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            connection = self._own.connection = kind(host, port, timeout=self._timeout_s)
        headers = {"content-type": "application/json", COPY_HEADER.decode(): "1"}
        if header_length is not None:
            headers |= {"content-type": "application/octet-stream", _HEADER_LENGTH: str(header_length)}
        reused = connection.sock is not None
        try:
            connection.request("POST", f"{self._path}/infer", body, headers)
            response = connection.getresponse()
            received = response.read(_MOST_BYTES)
            if response.read(1):
                raise UnavailableError(f"the answer has more than {_MOST_BYTES} bytes")
            length = response.headers.get(_HEADER_LENGTH, "")
            return response.status, int(length) if length.isdigit() else None, received
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if reused and isinstance(error, ConnectionError):  # the server has closed the idle connection
                return self._exchange(body, header_length)
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        except RemoraError:
            connection.close()
            raise


def load_function(place: str) -> Compare:
    """Return the function of ``FILE:FUNCTION`` as a comparison. Raises ConfigError.

    It gets the outputs of the model and of the shadow, each a mapping of names to arrays, and returns a text or False
    if they differ, else "", None or True. The comparison raises TypeError for any other value, because a number or an
    array may mean either.
    """
    import importlib.util

    file, _, name = place.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"remora_compare_{path.stem}", path) if file and name else None
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--shadow-compare: '{place}': expected a Python file and its function, FILE:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function: Any = getattr(module, name)
    except Exception as error:  # whatever the operator's module raises
        raise ConfigError(f"--shadow-compare: '{place}': {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"--shadow-compare: '{place}' is not a function")

    def compare(expected: Outputs, found: Outputs) -> str:
        result = function(dict(expected), dict(found))
        if result is None or isinstance(result, str):
            return result or ""
        if not isinstance(result, (bool, np.bool_)):
            raise TypeError(f"the function '{name}' returned {type(result).__name__}: expected str, bool or None")
        return "" if result else "the function says they differ"

    return compare


def _ready(table: ModelTable, key: str, version: int) -> ServedModel:
    model = table.serving(key).get(version)
    if model is None:
        raise NotFoundError(f"version {version} of model '{key}' is not ready")
    return model


def _as_json(form: InferForm, parameters: Mapping[str, Parameter], tensors: Sequence[CapturedTensor]) -> bytes:
    """Return a request with all tensors in JSON."""
    document: dict[str, Any] = {"parameters": parameters, "inputs": [printed(each) for each in tensors]}
    if form.id:
        document["id"] = form.id
    if form.outputs:
        document["outputs"] = [{"name": each.name} for each in form.outputs]
    return json.dumps(document).encode()


def _tensor(tensor: CapturedTensor) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.values().reshape(tensor.shape))


def _pair(option: str, entry: str, form: str) -> tuple[str, str]:
    name, mark, value = entry.partition("=")
    if not (mark and name.isidentifier() and value):
        raise ConfigError(f"{option}: expected {form} with a name of letters, digits and _")
    return name, value


def _checked(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        valid = False
    if not valid or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"--shadow-url: address of '{name}': expected http://HOST:PORT without user and query")
    return url


def _named(known: Mapping[str, object], name: str, option: str) -> None:
    if name and name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ValueError(f"'{name[:40]}' is not a name that the server's option {option} defines; there are: {there}")
