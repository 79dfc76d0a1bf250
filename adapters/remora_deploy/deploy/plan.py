"""Plan of a deployment as data: checks, calls of a control plane, steps with their undoing.

A platform's module computes the plan from the desired state and the state that was read; it makes no call itself.
`running` makes the calls. So a plan can be printed without credentials, and a test reads it like any value.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

State = Mapping[str, Any]
"""What serves, as answers by the name of their `Read`; None for an object that does not exist."""

Kind = Literal["missing", "denied", "quota", "exists", "busy", "invalid", "unreachable", "failed"]

GONE: frozenset[Kind] = frozenset({"missing"})
"""Kinds that mean that a deletion is already done."""
BUSY: frozenset[Kind] = frozenset({"busy"})
"""Kinds that pass with time."""
ANY: frozenset[Kind] = frozenset(get_args(Kind))
"""All kinds, for a call whose failure changes nothing."""
_PLACEHOLDER = re.compile(r"<<([\w.]+) of ([\w-]+)>>")
_SHOWN_CHARACTERS = 300
_Wanted = TypeVar("_Wanted")


class Call(NamedTuple):
    """One request to a control plane: an SDK's operation, a command, or an HTTP request."""

    target: str
    operation: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.target} {self.operation}".rstrip()


class CallError(Exception):
    """Refusal or failure of a call, in the platform's words.

    ``kind`` classifies it for decisions; ``code`` is the platform's own code.
    """

    def __init__(self, kind: Kind, text: str, code: str = "") -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.code = code


class RefusedError(Exception):
    """A deployment that cannot start or go on, with the reason and the cure as text."""


class Kept(NamedTuple):
    """Placeholder in a call's arguments for a value of an earlier answer."""

    name: str
    key: str

    def __str__(self) -> str:
        return f"<<{self.key} of {self.name}>>"


class Progress(NamedTuple):
    """Verdict on an answer: still waiting, done, or failed with a reason."""

    done: bool = True
    text: str = ""
    failure: str = ""


class Unknown(str):
    """Verdict of a check that cannot know, with what it did not find."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Check:
    """Check before a deployment.

    Attributes:
        what: subject, shown with the result.
        call: the request that gets the answer.
        judge: returns the problem in the answer, or "", or `Unknown`.
        cure: what to do about a problem, as a command where there is one.
        needed: False if the deployment may go on when the answer cannot be had; the check is then shown as skipped.
        absent: the problem if the object does not exist; "" if that is right.
        keep: name of the answer for `Platform.settled`.
    """

    what: str
    call: Call
    judge: Callable[[Any], str] = lambda answer: ""
    cure: str = ""
    needed: bool = True
    absent: str = "it does not exist"
    keep: str = ""


@dataclass(frozen=True, slots=True)
class Read:
    """Read of one object.

    ``make`` returns None if the earlier reads leave nothing to read. Without ``needed`` a refused read counts as a
    missing object.
    """

    name: str
    make: Callable[[State], Call | None]
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """One act of a deployment.

    Attributes:
        phase: preflight, image, upload, role, deploy, golden request, traffic or clean.
        call: the request.
        until: verdict on the answer; the call is repeated while it is not done.
        accepts: kinds of errors that mean that the step is already done.
        retries: kinds of errors after which the call is repeated, because a new object takes time to be usable.
        limit_s: time limit of the repetitions.
        every_s: interval of the repetitions.
        keep: name of the answer for `Kept` arguments.
        pick: converts the answer to keep.
        undo: steps that take this one back.
        undo_if: whether they apply, by the state that is read after a failure.
        extra: True if what serves does not need it; a failure is an error, but nothing is undone.
    """

    phase: str
    call: Call
    until: Callable[[Any], Progress] | None = None
    accepts: frozenset[Kind] = frozenset()
    retries: frozenset[Kind] = frozenset()
    limit_s: float = 3600.0
    every_s: float = 5.0
    keep: str = ""
    pick: Callable[[Any], Any] | None = None
    undo: tuple[Step, ...] = ()
    undo_if: Callable[[State], bool] = field(default=lambda state: True)
    extra: bool = False


class Platform(Protocol):
    """A service on one platform, with its desired state if it is deployed. Methods are pure.

    ``name`` is the service's name and ``title`` that of the platform.
    """

    name: str
    title: str

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""

    def settled(self, found: State) -> Platform:
        """Return the deployment with the answers of the checks, such as the image's digest."""

    def reads(self) -> Sequence[Read]:
        """Return the reads of the current state, in order."""

    def settle(self, state: State) -> Sequence[Step]:
        """Return the steps that wait for a change in progress; the state is read again after them."""

    def sized(self, state: State) -> Platform:
        """Return the deployment with the limits of what serves, where none were requested."""

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps from a state to the desired one. Raises RefusedError."""

    def differences(self, state: State) -> Sequence[str]:
        """Return how what serves differs from what was requested."""

    def shares(self, state: State) -> Mapping[str, int]:
        """Return the percentage of the requests that each version answers."""

    def status(self, state: State) -> Sequence[str]:
        """Return the lines that describe the state."""

    def reason(self, state: State) -> str:
        """Return the platform's reason for a failure that the state shows, or ""."""

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the calls whose answers `log_text` turns into the last lines of the log."""

    def log_text(self, answer: Any) -> str:
        """Return the text in an answer to a call of `logs`."""

    def ask(self, state: State, body: bytes) -> Call:
        """Return the call that sends an inference request to what serves."""

    def answer_of(self, answer: Any) -> bytes:
        """Return the response's body. Raises CallError for a failed inference."""

    def target(self, state: State) -> str:
        """Return the version that a rollback returns to. Raises RefusedError without one."""

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to that version. Raises RefusedError without one."""

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the steps that remove everything that a deployment created."""

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment, and its cost, as label and text."""


def resolve(arguments: Any, kept: State) -> Any:
    """Replace each `Kept` by its value. Raises KeyError for an answer without it."""
    if isinstance(arguments, Kept):
        found = kept[arguments.name]
        for part in arguments.key.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found
    if isinstance(arguments, Mapping):
        return {resolve(key, kept): resolve(value, kept) for key, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        return [resolve(value, kept) for value in arguments]
    if isinstance(arguments, str) and "<<" in arguments:
        return _PLACEHOLDER.sub(lambda match: str(resolve(Kept(match[2], match[1]), kept)), arguments)
    return arguments


def shown(call: Call) -> str:
    """Return a call with all arguments, as a dry run prints it; a program's as its command line."""
    if "words" in call.arguments:
        line = shlex.join([call.target, *map(str, call.arguments["words"])])
        text = call.arguments.get("input", "")
        return f"{line} <<'END'\n{text}\nEND" if text else line
    return f"{call} {json.dumps(call.arguments, indent=1, default=_as_text)}"


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(value)} bytes)"
    return str(value)


def find(state: State, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of nested mappings and lists, or the default."""
    found: Any = state
    for part in path.split("."):
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping) and found.get(part) is not None:
            found = found[part]
        else:
            return default
    return found


def after_all(steps: Sequence[Step]) -> list[Step]:
    """Return steps of cleaning, whose failure leaves what serves."""
    return [replace(each, extra=True) for each in steps]


def desired(wanted: _Wanted | None, name: str) -> _Wanted:
    """Return a desired state. Raises RefusedError for a service found by its name."""
    if wanted is None:
        raise RefusedError(f"{name}: no desired state")
    return wanted


def digest_of(value: object, letters: int = 8) -> str:
    """Return a short digest of a value of JSON, for the name of a version."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:letters]


def advice(service: str, cost: str, update: str = "") -> list[tuple[str, str]]:
    """Return the commands after a deployment of ``service``: platform, name and flags."""
    return [
        ("ask", f"remora deploy invoke {service} --request request.json"),
        ("watch", f"remora deploy logs {service}"),
        ("update", update or "repeat the command with another model or image"),
        ("back", f"remora deploy rollback {service}"),
        ("remove", f"remora deploy undeploy {service}"),
        ("cost", cost),
    ]
