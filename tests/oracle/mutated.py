"""Recorded requests, each changed a little, to a real Triton and `remora serve`, and where the two differ.

A case of a chain is sent with the whole chain around it, first to Triton, then to remora. Whatever may have left the
two in different states (a difference, a death, a silence) starts both afresh. What `accepted.json` lists, with its
reason, is only counted. The same seed asks the same requests, as far as the time goes.
"""

from __future__ import annotations

import base64
import collections
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mutations import Mutator, unfitted
from run import COMMAND

HERE = Path(__file__).resolve().parent
TRITON = "{oracle}/run_triton.sh {{repo}} {{http}} {{grpc}} {{metrics}} {{flags}}"
PATIENCE_S = 10
RETRY_S = 3
LOOK_S = 0.2
ASKED = ("method", "request", "requests", "metadata", "requests_http")
SAID = ("body", "body_b64", "details", "failure", "response", "messages", "replies")
# What Triton says when it waited in vain, or when the process of a Python model has died.
SILENCE = re.compile("DEADLINE_EXCEEDED|is not healthy")
# Texts that differ only in such parts are one difference.
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A difference that is meant to be. Patterns that are given must all be found."""

    why: str
    case: str = ""
    asked: str = ""
    theirs: str = ""
    ours: str = ""
    what: str = ""

    def covers(self, difference: Difference) -> bool:
        return all(
            re.search(getattr(self, part), getattr(difference, part), re.DOTALL)
            for part in ("case", "asked", "theirs", "ours", "what")
        )


@dataclass(frozen=True, slots=True)
class Difference:
    case: str
    asked: str
    theirs: str
    ours: str
    what: str

    @property
    def kind(self) -> tuple[str, str]:
        return VARYING.sub("*", self.theirs)[:160], VARYING.sub("*", self.ours)[:160]


class Pair:
    """Triton and remora with the same models and flags."""

    def __init__(self, replay: ModuleType, oracle: Path, setup: dict[str, Any], models: Path | None = None) -> None:
        triton, remora = TRITON.format(oracle=oracle), COMMAND.format(python=sys.executable, more="")
        self._starts = [
            partial(replay.Server, triton, setup, models or oracle / "models", head_flags=False),
            partial(replay.Server, remora, setup, models or oracle / "models"),
        ]
        self._servers: list[Any] = []
        self._ends = ExitStack()

    def __enter__(self) -> Pair:
        """Raises RuntimeError when one of the two does not become ready."""
        with ExitStack() as ends:
            for start in self._starts:
                server = start()
                ends.callback(server.stop)
                ends.callback(server.target.close)
                self._servers.append(server)
            for server in self._servers:
                server.wait_until_ready()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def dead(self) -> list[str]:
        return [
            name
            for name, server in zip(("triton", "remora"), self._servers, strict=True)
            if server.process.poll() is not None
        ]

    def answers(self, replay: ModuleType, cases: list[dict[str, Any]]) -> list[list[Any]]:
        """What each of the two says to all cases in order."""
        return [[self._answer(replay, server, case) for case in cases] for server in self._servers]

    def _answer(self, replay: ModuleType, server: Any, case: dict[str, Any]) -> dict[str, Any]:
        limit = time.monotonic() + min(case.get("retry_s", 0), RETRY_S)
        while True:
            try:
                answer = server.target.answer(case)
            except (OSError, ValueError) as error:
                answer = {"failure": repr(error), "code": "FAILURE", "details": repr(error)}
            if time.monotonic() >= limit or replay.compare(case, case["answer"], answer) is None or ended(server):
                break
        text = json.dumps(answer).replace(str(server.repo), "<repo>").replace(str(server.work), "<work>")
        return json.loads(text)


class Fuzz:
    """One file of cases, asked until a time."""

    def __init__(self, replay: ModuleType, oracle: Path, path: Path, seed: str) -> None:
        self.replay, self.oracle, self.path = replay, oracle, path
        self.setup, cases = replay.load_cases(path)
        self.dice = random.Random(f"{path.stem} {seed}")
        self.mutator = Mutator(self.dice)
        self.units = list(units(cases))
        self.asked = self.deaths = 0

    def differences(self, seconds: float) -> Iterator[Difference]:
        """For so long, the first start left out."""
        until = 0.0
        while not until or time.monotonic() < until:
            try:
                with Pair(self.replay, self.oracle, self.setup) as pair:
                    until = until or time.monotonic() + seconds
                    yield from self._rounds(pair, until)
            except RuntimeError as error:
                yield Difference("", "to start", "", str(error), "one of the two does not start")
                return

    def _rounds(self, pair: Pair, until: float) -> Iterator[Difference]:
        """Until the two may be in different states."""
        while time.monotonic() < until:
            cases = self._round()
            self.asked += 1
            theirs, ours = pair.answers(self.replay, cases)
            dead = pair.dead()
            if "remora" in dead:
                yield Difference(cases[-1]["id"], asked(cases[-1]), shown(theirs[-1]), "remora died", "died")
            if dead or any(SILENCE.search(shown(row)) or "failure" in row for row in theirs):
                self.deaths += 1
                return
            for number, (case, want, got) in enumerate(zip(cases, theirs, ours, strict=True)):
                what = self._compared(case, want, got)
                if what:
                    before = "".join(f" <- {asked(each)}" for each in reversed(cases[:number]))
                    yield Difference(case["id"], asked(case) + before, shown(want), shown(got), what)
                    break
            else:
                continue
            if len(cases) > 1:
                return

    def _compared(self, case: dict[str, Any], want: dict[str, Any], got: dict[str, Any]) -> str:
        try:
            what = self.replay.compare(case, want, got) or ""
        except (KeyError, ValueError, AttributeError) as error:
            what = f"cannot be read: {error!r}"
        # The other answer of a case may be of another kind than the recorded one: no events, no JSON.
        return "" if "cannot be read" in what and shown(want) == shown(got) else what

    def _round(self) -> list[dict[str, Any]]:
        unit = self.dice.choice(self.units)
        changed = self.dice.randrange(len(unit))
        return [self._mutated(case) if number == changed else case for number, case in enumerate(unit)]

    def _mutated(self, case: dict[str, Any]) -> dict[str, Any]:
        for _ in range(50):
            changed = self.mutator.mutated(case) | {"timeout_s": PATIENCE_S}
            if not self.replay.is_grpc(case) or self._is_message(changed):
                return changed
        return unfitted(case)

    def _is_message(self, case: dict[str, Any]) -> bool:
        """gRPC cases are JSON of protobuf: not every document is a message."""
        from google.protobuf import json_format
        from tritonclient.grpc import service_pb2

        name = "ModelInfer" if case["method"] == "ModelStreamInfer" else case["method"]
        try:
            for document in [case["request"]] if "request" in case else case.get("requests", []):
                json_format.ParseDict(document, getattr(service_pb2, name + "Request")())
        except (json_format.ParseError, ValueError, TypeError, AttributeError, OverflowError):
            return False
        return True


def ended(server: Any) -> bool:
    """Tell whether a server's process has ended, within a moment: its requests would only time out."""
    try:
        server.process.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def units(cases: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Chains whole, other cases by themselves."""
    chains = collections.defaultdict(list)
    for case in cases:
        chains[case.get("chain")].append(case)
    yield from ([case] for case in chains.pop(None, []))
    yield from chains.values()


def asked(case: dict[str, Any]) -> str:
    """What a case asks, in a line."""
    if "path" not in case:
        return json.dumps({key: case[key] for key in ASKED if key in case})
    body = case.get("body", "")
    if not body and case.get("body_b64"):
        read = base64.b64decode(case["body_b64"]).decode("utf-8", "backslashreplace")
        body = f"b64:{case['body_b64']} {read}"  # accepted.json speaks of what it says
    return f"{case['method']} {case['path']} {json.dumps(case.get('headers', {}))} {body}"


def shown(answer: dict[str, Any]) -> str:
    """What came, in a line."""
    said = next((answer[key] for key in SAID if answer.get(key)), "")
    return f"{answer.get('status', answer.get('code', ''))} {said if isinstance(said, str) else json.dumps(said)}"


def accepted_differences() -> list[Accepted]:
    return [Accepted(**row) for row in json.loads((HERE / "accepted.json").read_text(encoding="utf-8"))]
