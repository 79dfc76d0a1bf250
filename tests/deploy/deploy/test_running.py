"""Execution of plans: progress, retries, limits, undoing and interruption, on a platform of one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from remora_deploy.deploy.plan import BUSY, GONE, Call, CallError, Check, Kept, Progress, Read, State, Step, resolve
from remora_deploy.deploy.running import Runner

NOTHING: dict[str, Any] = {}


@dataclass
class Toy:
    """A platform with scripted steps. Its state is what `Answers.state` holds."""

    plan: Sequence[Step]
    preflight: Sequence[Check] = ()
    different: Sequence[str] = ()
    name: str = "digits"
    title: str = "Toy"

    def checks(self) -> Sequence[Check]:
        return self.preflight

    def settled(self, found: State) -> Toy:
        return self

    def reads(self) -> Sequence[Read]:
        return (Read("object", lambda state: Call("toy", "read", {})),)

    def settle(self, state: State) -> Sequence[Step]:
        return ()

    def sized(self, state: State) -> Toy:
        return self

    def steps(self, state: State) -> Sequence[Step]:
        return self.plan

    def differences(self, state: State) -> Sequence[str]:
        return self.different

    def shares(self, state: State) -> dict[str, int]:
        return {str(state["object"]): 100}

    def target(self, state: State) -> str:
        return "old"

    def status(self, state: State) -> Sequence[str]:
        return [f"object: {state['object']}"] if state["object"] else []

    def reason(self, state: State) -> str:
        return "the platform's reason"

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        return (Call("toy", "log", {}),)

    def log_text(self, answer: Any) -> str:
        return str(answer)

    def ask(self, state: State, body: bytes) -> Call:
        return Call("toy", "ask", {"body": body})

    def answer_of(self, answer: Any) -> bytes:
        return bytes(answer)

    def rollback(self, state: State) -> Sequence[Step]:
        return self.plan

    def undeploy(self, state: State) -> Sequence[Step]:
        return ()

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        return [("ask", "remora deploy invoke")]


@dataclass
class Answers:
    """Answers of operations in order; the last one is repeated. An exception is raised."""

    script: dict[str, list[Any]]
    made: list[str] = field(default_factory=list)
    arguments: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    now_s: float = 0.0

    def __call__(self, call: Call) -> Any:
        self.made.append(call.operation)
        self.arguments.append(call.arguments)
        answers = self.script.get(call.operation, [None])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def deploy(self, toy: Toy) -> bool:
        return self.runner().deploy(toy)

    def runner(self) -> Runner:
        return Runner(self, self.lines.append, lambda: self.now_s, self.sleep)

    def acts(self) -> list[str]:
        return [name for name in self.made if name not in ("read", "log")]


def step(operation: str, *, undo: str = "", **more: Any) -> Step:
    undone = (Step("deploy", Call("toy", undo, {})),) if undo else ()
    return Step("deploy", Call("toy", operation, more.pop("arguments", NOTHING)), undo=undone, **more)


FAILS = CallError("invalid", "it is refused")


def test_steps_are_undone_in_reverse_order_and_the_log_is_shown() -> None:
    toy = Toy([step("one", undo="-one"), step("two", undo="-two"), step("three", undo="-three"), step("four")])
    answers = Answers({"three": [FAILS], "log": ["the log's tail"]})
    assert not answers.deploy(toy)
    assert answers.acts() == ["one", "two", "three", "-three", "-two", "-one"], "three's outcome is unknown"
    text = "\n".join(answers.lines)
    assert "it is refused" in text
    assert "reason: the platform's reason" in text
    assert "log: the log's tail" in text
    assert answers.lines[-1] == "digits is as it was before"


def test_an_undo_that_fails_is_named_and_the_others_go_on() -> None:
    toy = Toy([step("one", undo="-one"), step("two", undo="-two"), step("three")])
    answers = Answers({"three": [FAILS], "-two": [CallError("denied", "no right")]})
    assert not answers.deploy(toy)
    assert answers.acts()[-2:] == ["-two", "-one"]
    assert "not undone: toy two: toy -two: no right" in answers.lines
    assert "digits is as it was before" not in answers.lines


def test_an_undo_is_left_out_where_the_state_says_so() -> None:
    toy = Toy([step("one", undo="-one", undo_if=lambda state: state["object"] == "new"), step("two")])
    answers = Answers({"two": [FAILS], "read": ["old"]})
    assert not answers.deploy(toy)
    assert "-one" not in answers.made


def test_a_state_that_cannot_be_read_after_a_failure_undoes_nothing() -> None:
    toy = Toy([step("one", undo="-one"), step("two")])
    answers = Answers({"two": [FAILS], "read": [None, CallError("denied", "expired")]})
    assert not answers.deploy(toy)
    assert answers.lines[-1] == "the state cannot be read, so nothing was undone: expired"


def test_a_difference_between_what_serves_and_the_plan_is_a_failure() -> None:
    answers = Answers({})
    assert not answers.deploy(Toy([step("one", undo="-one")], different=["the old one serves"]))
    assert "the old one serves" in "\n".join(answers.lines)
    assert answers.acts() == ["one", "-one"]


def test_every_failed_check_is_shown_with_its_cure_and_nothing_is_changed() -> None:
    checks = [
        Check("rights", Call("toy", "rights", {}), cure="log in"),
        Check("quota", Call("toy", "quota", {}), lambda answer: "too low" if answer < 2 else "", "ask for more"),
        Check("luxury", Call("toy", "luxury", {}), needed=False),
        Check("name", Call("toy", "name", {}), absent=""),
    ]
    denied, missing = CallError("denied", "no token"), CallError("missing", "no name")
    answers = Answers({"rights": [denied], "quota": [1], "luxury": [denied], "name": [missing]})
    assert not answers.deploy(Toy([step("one")], checks))
    text = "\n".join(answers.lines)
    for part in ("rights: no token", "to do: log in", "quota: too low", "to do: ask for more", "luxury: not checked"):
        assert part in text
    assert "name: ok" in text
    assert "one" not in answers.made


def test_a_step_waits_for_its_verdict_and_shows_each_state_once() -> None:
    until = lambda answer: Progress(answer == "done", answer)  # noqa: E731
    answers = Answers({"one": ["busy", "busy", "busy", "done"]})
    assert answers.deploy(Toy([step("one", until=until, every_s=10.0)]))
    assert [line for line in answers.lines if "busy" in line] == ["deploy          toy one: busy  (0.0 s)"]
    assert any("done  (30.0 s)" in line for line in answers.lines)


def test_a_step_that_never_ends_fails_at_its_limit() -> None:
    until = lambda answer: Progress(False, "busy")  # noqa: E731
    answers = Answers({})
    assert not answers.deploy(Toy([step("one", until=until, limit_s=60.0)]))
    assert "toy one: busy after 60 s" in "\n".join(answers.lines)


def test_a_call_is_repeated_for_errors_that_pass_and_accepted_for_what_is_done() -> None:
    busy, gone = CallError("busy", "not yet"), CallError("missing", "gone")
    answers = Answers({"one": [busy, busy, None], "two": [gone]})
    assert answers.deploy(Toy([step("one", retries=BUSY), step("two", accepts=GONE)]))
    assert answers.acts() == ["one", "one", "one", "two"]
    forever = Answers({"one": [busy]})
    assert not forever.deploy(Toy([step("one", retries=BUSY)]))
    assert 90 <= forever.now_s < 110, "a role that never becomes usable is an error"


def test_a_read_is_repeated_while_the_platform_cannot_be_reached() -> None:
    answers = Answers({"read": [CallError("unreachable", "reset"), "there"]})
    assert answers.runner().status(Toy([]))
    assert answers.lines == ["object: there"]


def test_an_interruption_undoes_nothing_and_says_how_to_go_on() -> None:
    answers = Answers({"two": [KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        answers.deploy(Toy([step("one", undo="-one"), step("two")]))
    assert answers.acts() == ["one", "two"]
    assert "Repeat the command to continue" in answers.lines[-1]


def test_an_answer_is_an_argument_of_a_later_call() -> None:
    arguments = {"version": Kept("made", "id"), "path": f"/models/{Kept('made', 'id')}", "all": [Kept("made", "of.0")]}
    toy = Toy([step("one", keep="made"), step("two", arguments=arguments)])
    answers = Answers({"one": [{"id": "7", "of": ["x"]}]})
    assert answers.deploy(toy), answers.lines
    assert {"version": "7", "path": "/models/7", "all": ["x"]} in answers.arguments
    with pytest.raises(KeyError):
        resolve(Kept("made", "id"), {"made": {}})


def test_logs_and_status_of_a_service_that_is_not_there_fail() -> None:
    answers = Answers({"log": [""]})
    assert not answers.runner().status(Toy([]))
    assert not answers.runner().logs(Toy([]), 5)
    assert answers.lines == ["Toy has no digits", "Toy has no log of digits"]
    assert answers.runner().change(Toy([]), Toy([]).undeploy, "gone")
    assert answers.lines[-1] == "digits: nothing to do"
