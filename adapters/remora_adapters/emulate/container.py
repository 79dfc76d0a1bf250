"""Promises that every platform asks of a container, made for the paths and times of one; the law: no platform in here.

Each function gives a check's ``run`` for a platform's own figures; why it matters there is the platform's to say.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from remora_adapters.emulate import Failed, Skipped
from remora_adapters.emulate.asking import HttpReply
from remora_adapters.emulate.stage import Stage

Run = Callable[[Stage], None]
Call = Callable[[Stage], HttpReply]
"""Sends the user's request as the platform would."""
_SLOWEST = 1.5
"""Times are judged with this much room: this machine has other things to do."""


def starts(stage: Stage) -> None:
    """It answers something before it ends, if it ends."""
    if not stage.process.running and not any(seen.answer.status for seen in stage.boot):
        raise Failed(f"the process ended before it answered anything: {stage.process.last_words()}")


def becomes_ready(stage: Stage) -> None:
    """The readiness probe was answered well in time."""
    if stage.ready:
        return
    seen = stage.boot[-1].answer.shown if stage.boot else "none"
    probe = stage.platform.probe
    wanted = f" with {probe.status}" if probe.status else ""
    raise Failed(f"{probe.path} was never answered{wanted}; the last answer was: {seen}")


def probes_in_time(stage: Stage) -> None:
    """No probe took longer than the platform waits for one."""
    limit_s = stage.probe_s
    slow = [
        seen
        for seen in stage.boot
        if "timed out" in seen.answer.trouble or (seen.answer.status and seen.answer.total_s > limit_s)
    ]
    if slow:
        raise Failed(f"{len(slow)} of {len(stage.boot)} probes took longer than {limit_s:g} s")


def listens_where_told(variable: str) -> Run:
    """On the port that the platform chose, for all interfaces."""

    def run(stage: Stage) -> None:
        rows = stage.process.listening()
        mine = [row for row in rows if row.port == stage.launch.port]
        if not mine:
            raise Failed(f"{variable} says {stage.launch.port}, but it listens on {[row.port for row in rows]}")
        if not any(row.everywhere for row in mine):
            raise Failed(f"port {stage.launch.port} is bound to some interfaces only")

    return run


def has_one_port(stage: Stage) -> None:
    """Nothing listens beside the platform's port."""
    ports = {row.port for row in stage.process.listening()}
    if len(ports) > 1:
        raise Failed(f"it listens on {sorted(ports)}: one port is let through")


def answers(call: Call, within_s: float) -> Run:
    """A request is answered well, at once and again."""

    def run(stage: Stage) -> None:
        for count in ("first", "second"):
            answer = must_answer(call(stage), f"the {count} request")
            if answer.total_s > stage.limit_s(within_s) * _SLOWEST:
                raise Failed(f"the {count} request took {answer.total_s:.1f} s: {within_s:g} s are the limit")

    return run


def refuses(path: Callable[[Stage], str], *words: str) -> Run:
    """Bodies that cannot be read are a 4xx or 5xx in JSON with a reason under one of ``words``."""

    def run(stage: Stage) -> None:
        for body in (b"{", b"\x00\xff no request"):
            answer = stage.ask("POST", path(stage), body, {"Content-Type": "application/json"})
            if not 400 <= answer.status < 600:
                raise Failed(f"a body that is no request got {answer.shown}")
            if not any(f'"{word}"'.encode() in answer.body for word in words):
                raise Failed(f'the {answer.status} has no {{"{words[0]}": ...}}: {answer.shown}')

    return run


def admits(call: Call, concurrency: int, requests: int) -> Run:
    """What a proxy with a limit lets through is answered, all of it, and probes with it."""

    def run(stage: Stage) -> None:
        turns = threading.Semaphore(concurrency)

        def one(_: int) -> HttpReply:
            with turns:
                return call(stage)

        must_answer(call(stage), "a request")
        with ThreadPoolExecutor(max(concurrency, 1) + 4) as pool:
            calls = [pool.submit(one, index) for index in range(requests)]
            probe = stage.platform.probe
            probes = [stage.ask("GET", probe.path, timeout_s=stage.probe_s)]
            while not all(each.done() for each in calls):
                probes.append(stage.ask("GET", probe.path, timeout_s=stage.probe_s))
        lost = [each.result() for each in calls if not 200 <= each.result().status < 300]
        if lost:
            raise Failed(f"{len(lost)} of {requests} requests, {concurrency} at a time, failed: {lost[0].shown}")
        bad = [each for each in probes if not probe.passes(each.status)]
        if bad:
            raise Failed(f"{len(bad)} of {len(probes)} probes under load failed: {bad[0].shown}")

    return run


def leaves_the_model_alone(stage: Stage) -> None:
    """The mounted folder is as it was."""
    if stage.settings.model is None:
        raise Skipped("needs the model's folder: --model DIR")
    if stage.model_changed():
        raise Failed(f"something under {stage.settings.model} was written while it served")


def serves_on(call: Call, seconds: float) -> Run:
    """After SIGTERM requests are answered for a while, as traffic still comes."""

    def run(stage: Stage) -> None:
        process = stage.process
        must_answer(call(stage), "a request before SIGTERM")
        process.terminate()
        begin, count = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            answer = call(stage)
            at_s = time.monotonic() - begin
            if not 200 <= answer.status < 300 and at_s < seconds:  # later nothing was promised
                process.wait(stage.grace_s)
                raise Failed(f"{at_s:.1f} s after SIGTERM, after {count} good answers: {answer.shown}")
            count += 1
        process.wait(stage.grace_s)

    return run


def ends_in_time(stage: Stage) -> None:
    """It ends by itself with status 0 within the grace."""
    ending = stage.process.ending
    if ending is None:
        stage.process.terminate()
        ending = stage.process.wait(stage.grace_s)
    if ending.killed:
        raise Failed(f"it was still there {stage.grace_s:g} s after SIGTERM")
    if ending.status != 0:
        raise Failed(f"it ended with status {ending.status}: {stage.process.last_words()}")


def instances(stage: Stage) -> list[Any]:
    """The instances of the predict request that was given, one or more. Raises Skipped when it is none."""
    try:
        found = json.loads(stage.body)["instances"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, list) or not found:
        raise Skipped('needs a request with instances: --body FILE with {"instances": [...]}')
    return found


def json_object(answer: HttpReply) -> dict[str, Any]:
    """The JSON object that an answer is. Raises Failed."""
    try:
        found = json.loads(answer.body)
    except ValueError as error:
        raise Failed(f"no JSON: {answer.shown}") from error
    if not isinstance(found, dict):
        raise Failed(f"no JSON object: {answer.shown}")
    return found


def must_answer(answer: HttpReply, what: str) -> HttpReply:
    """The answer, which must be a good one. Raises Failed."""
    if not 200 <= answer.status < 300:
        raise Failed(f"{what}: {answer.shown}")
    return answer
