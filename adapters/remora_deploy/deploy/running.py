"""Execution of a plan: checks, steps with progress, and their undoing on failure.

Invariant: after a failure the steps of this run are undone in reverse order, and the exit is an error. What serves as
requested is not undone, whatever fails after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.plan import (
    BUSY,
    Call,
    CallError,
    Check,
    Platform,
    Progress,
    RefusedError,
    State,
    Step,
    Unknown,
    resolve,
)
from remora_deploy.deploy.versions import different

_LOG_LINES = 20
_RETRY_LIMIT_S = 90.0
"""Time for a new object to be usable everywhere, such as a role of AWS."""
_MOST_READ_RETRIES = 5
_PASSING = BUSY | {"unreachable"}


class StepError(Exception):
    """Failure of a step, with the platform's reason."""


@dataclass(slots=True)
class Runner:
    """Runs plans of one platform.

    Attributes:
        perform: makes a call; raises CallError.
        write: prints a line.
        clock: monotonic time, in seconds.
        sleep: waits for seconds.
    """

    perform: Callable[[Call], Any]
    write: Callable[[str], None]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    _answers: dict[str, Any] = field(default_factory=dict)
    _done: list[Step] = field(default_factory=list)
    _lost: list[str] = field(default_factory=list)

    # -- the commands ------------------------------------------------------------------------------------------------

    def deploy(self, platform: Platform) -> bool:
        """Bring a service to its desired state, or back to the earlier one and return False."""
        try:
            platform = self._check(platform)
            state = self._settled(platform)
            platform = platform.sized(state)
            steps = platform.steps(state)
        except (RefusedError, CallError, StepError) as error:
            self.write(f"{platform.name} was not deployed: {error}")
            return False
        try:
            self._run([step for step in steps if not step.extra])
            state = self.read(platform)
            different = platform.differences(state)
            if different:
                raise StepError("what serves is not what was requested: " + "; ".join(different))
            self._line("compare", f"{platform.name} serves what was requested", self.clock())
            self._run_extra(steps)
        except (StepError, CallError, RefusedError) as error:
            self._fail(platform, str(error))
            return False
        except KeyboardInterrupt:
            self.write(
                f"interrupted: nothing was undone, and {platform.title} goes on with what it has started. Repeat the "
                "command to continue"
            )
            raise
        for label, text in platform.advice(state):
            self.write(f"{label + ':':<10}{text}")
        for line in self._lost:
            self.write(f"not done: {line}. {platform.name} serves without it; repeat the command when it can be done")
        return not self._lost

    def rollback(self, platform: Platform, golden: Golden | None = None) -> bool:
        """Return to the version that served before, and compare all shares with what was requested."""
        try:
            state = self._settled(platform)
            target = platform.target(state)
            steps = platform.rollback(state)
            self._run([step for step in steps if not step.extra])
            state = self.read(platform)
            wrong = different(platform.shares(state), {target: 100})
            if wrong:
                raise StepError("what serves is not what was requested: " + "; ".join(wrong))
            self._line("compare", f"version {target} serves all requests", self.clock())
            self._run(golden_step(golden, platform.ask(state, golden.body if golden else b""), platform.answer_of))
            self._run_extra(steps)
        except (RefusedError, CallError, StepError) as error:
            self.write(f"failed: {error}")
            return False
        for line in self._lost:
            self.write(f"not done: {line}")
        self.write(f"{platform.name} serves by its earlier version")
        return not self._lost

    def change(self, platform: Platform, plan: Callable[[State], Sequence[Step]], ending: str) -> bool:
        """Run the steps that ``plan`` computes from the state."""
        try:
            steps = plan(self._settled(platform))
            self._run(steps)
        except (RefusedError, CallError, StepError) as error:
            self.write(f"failed: {error}")
            return False
        self.write(ending if steps else f"{platform.name}: nothing to do")
        return True

    def status(self, platform: Platform) -> bool:
        """Print what serves. Returns False if there is no such service."""
        state = self.read(platform)
        lines = platform.status(state)
        for line in lines or (f"{platform.title} has no {platform.name}",):
            self.write(line)
        return bool(lines)

    def logs(self, platform: Platform, lines: int) -> bool:
        """Print the last lines of the service's log. Returns False if it has none."""
        texts = [platform.log_text(self.perform(call)) for call in platform.logs(self.read(platform), lines)]
        text = "\n".join(text.rstrip("\n") for text in texts if text.strip())
        self.write("\n".join(text.splitlines()[-lines:]) or f"{platform.title} has no log of {platform.name}")
        return bool(text)

    def invoke(self, platform: Platform, body: bytes) -> bytes:
        """Send an inference request to what serves and return the response's body. Raises CallError."""
        return platform.answer_of(self.perform(platform.ask(self.read(platform), body)))

    # -- parts -------------------------------------------------------------------------------------------------------

    def read(self, platform: Platform) -> State:
        """Read the current state. Raises CallError for anything but a missing object."""
        state: dict[str, Any] = {}
        for read in platform.reads():
            call = read.make(state)
            try:
                state[read.name] = None if call is None else self._read(call)
            except CallError:
                if read.needed:
                    raise
                state[read.name] = None
        return state

    def _settled(self, platform: Platform) -> State:
        """Return the state after a change that is in progress."""
        state = self.read(platform)
        steps = platform.settle(state)
        self._run(steps)
        return self.read(platform) if steps else state

    def _read(self, call: Call) -> Any:
        try:
            return self._ask(call)
        except CallError as error:
            if error.kind == "missing":
                return None
            raise

    def _ask(self, call: Call) -> Any:
        """Make a reading call, again while the platform cannot be reached or limits the rate."""
        for trial in range(_MOST_READ_RETRIES):
            try:
                return self.perform(call)
            except CallError as error:
                if error.kind not in _PASSING or trial + 1 == _MOST_READ_RETRIES:
                    raise
                self.sleep(2.0**trial)
        raise AssertionError("not reached")

    def _check(self, platform: Platform) -> Platform:
        """Run all checks and show each. Raises RefusedError with the number of failed ones."""
        found: dict[str, Any] = {}
        problems = 0
        for check in platform.checks():
            begin = self.clock()
            problem, note = self._judge(check, found)
            self._line("preflight", f"{check.what}: {problem or note}", begin)
            if problem:
                problems += 1
                if check.cure:
                    self.write(f"{'':<16}to do: {check.cure}")
        if problems:
            raise RefusedError(f"{problems} of the checks failed, and nothing was changed")
        return platform.settled(found)

    def _judge(self, check: Check, found: dict[str, Any]) -> tuple[str, str]:
        """Return the problem of a check, or "" and a note."""
        try:
            answer = self._ask(check.call)
        except CallError as error:
            if error.kind == "missing":
                return check.absent, "" if check.absent else "ok"
            return ("", f"not checked: {error}") if not check.needed else (str(error), "")
        if check.keep:
            found[check.keep] = answer
        problem = check.judge(answer)
        return ("", problem) if isinstance(problem, Unknown) else (problem, "ok")

    def _run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if step.undo:
                self._done.append(step)  # before the call, whose outcome is unknown if it fails late
            try:
                self._act(step)
            except (KeyError, TypeError, IndexError) as error:
                raise StepError(f"{step.call}: an earlier answer lacks {error}") from error

    def _run_extra(self, steps: Sequence[Step]) -> None:
        """Make the calls that what serves does not need, and report each that fails."""
        for step in steps:
            if step.extra:
                try:
                    self._run([replace(step, undo=())])
                except StepError as error:
                    self._lost.append(str(error))

    def _act(self, step: Step) -> None:
        """Make a step's call until its verdict is final. Raises StepError."""
        begin = self.clock()
        call = step.call._replace(arguments=resolve(step.call.arguments, self._answers))
        shown = ""
        while True:
            answer = self._call(step, call, begin)
            progress = step.until(answer) if step.until is not None else Progress()
            if progress.failure:
                raise StepError(progress.failure)
            if progress.done:
                break
            if progress.text != shown:
                shown = progress.text
                self._line(step.phase, f"{_subject(call)}: {shown}", begin)
            if self.clock() - begin > step.limit_s:
                raise StepError(f"{_subject(call)}: {shown or 'not done'} after {step.limit_s:g} s")
            self.sleep(step.every_s)
        if step.keep:
            self._answers[step.keep] = step.pick(answer) if step.pick is not None else answer
        self._line(step.phase, f"{_subject(call)}{f': {progress.text}' if progress.text else ''}", begin)

    def _call(self, step: Step, call: Call, begin: float) -> Any:
        while True:
            try:
                return self.perform(call)
            except CallError as error:
                if error.kind in step.accepts:
                    return None
                again = error.kind in step.retries | BUSY or (error.kind == "unreachable" and step.until is not None)
                if not again or self.clock() - begin > min(step.limit_s, _RETRY_LIMIT_S):
                    raise StepError(f"{_subject(call)}: {error}") from error
            self.sleep(step.every_s)

    def _fail(self, platform: Platform, reason: str) -> None:
        """Show the reason and the log's tail, and undo what this run has done."""
        self.write(f"failed: {reason}")
        try:
            state = self.read(platform)
            detail = platform.reason(state)
            if detail and detail not in reason:
                self.write(f"reason: {detail}")
            self._show_log(platform, state)
            for step in platform.settle(state):  # because what is undone depends on how a change ends
                self._act(step)
        except (CallError, StepError) as error:
            self.write(f"the state cannot be read, so nothing was undone: {error}")
            return
        left = []
        for step in reversed(self._done):
            try:
                if step.undo_if(self.read(platform)):
                    for undo in step.undo:
                        self._act(replace(undo, phase="undo"))
            except (KeyError, TypeError, IndexError):  # the answer of a step that has created nothing
                continue
            except (CallError, StepError) as error:
                left.append(f"{_subject(step.call)}: {error}")
        for line in left:
            self.write(f"not undone: {line}")
        if not left:
            self.write(f"{platform.name} is as it was before")

    def _show_log(self, platform: Platform, state: State) -> None:
        try:
            texts = [platform.log_text(self.perform(call)) for call in platform.logs(state, _LOG_LINES)]
        except CallError as error:
            self.write(f"log: not available: {error}")
            return
        for line in "\n".join(texts).splitlines()[-_LOG_LINES:]:
            self.write(f"log: {line}")

    def _line(self, phase: str, text: str, begin: float) -> None:
        self.write(f"{phase:<16}{text}  ({self.clock() - begin:.1f} s)")


def _subject(call: Call) -> str:
    """Return a call with the name of its object, for a line of progress."""
    named = next((value for key, value in call.arguments.items() if key.endswith(("Name", "name"))), "")
    return f"{call} {named}".rstrip() if isinstance(named, str) else str(call)
