"""Checks that apply to containers of every platform.

Each function returns or is a check's ``run`` for a platform's paths and times. The platform's table states why it
matters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from remora.system.json_text import read_json
from remora_deploy.emulate import Failed, Skipped
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.stage import Stage

Run = Callable[[Stage], None]
Call = Callable[[Stage], HttpReply]
"""Function that sends the user's request as the platform would."""
_SLOWEST = 1.5
"""Tolerance factor for times, because the machine may be busy."""
_PAUSE_S = 0.02
"""Pause between two requests of a client that waits for the end."""


def starts(stage: Stage) -> None:
    """It answers a probe before it exits, if it exits."""
    if not stage.process.running and not any(seen.answer.status for seen in stage.boot):
        raise Failed(f"the process ended before it answered anything: {stage.process.log_tail()}")


def becomes_ready(stage: Stage) -> None:
    """The readiness probe succeeded in time."""
    if stage.ready:
        return
    seen = stage.boot[-1].answer.shown if stage.boot else "none"
    probe = stage.platform.probe
    wanted = f" with {probe.status}" if probe.status else ""
    raise Failed(f"{probe.path} was never answered{wanted}; the last answer was: {seen}")


def probes_in_time(stage: Stage) -> None:
    """No probe exceeded the platform's timeout."""
    limit_s = stage.probe_s
    slow = [
        seen
        for seen in stage.boot
        if "timed out" in seen.answer.trouble or (seen.answer.status and seen.answer.total_s > limit_s)
    ]
    if slow:
        raise Failed(f"{len(slow)} of {len(stage.boot)} probes took longer than {limit_s:g} s")


def listens_on_given_port(variable: str) -> Run:
    """Return a check that the server listens on the platform's port on all interfaces."""

    def run(stage: Stage) -> None:
        rows = stage.process.listening()
        mine = [row for row in rows if row.port == stage.launch.port]
        if not mine:
            raise Failed(f"{variable} is {stage.launch.port}, but it listens on {[row.port for row in rows]}")
        if not any(row.everywhere for row in mine):
            raise Failed(f"port {stage.launch.port} is bound to some interfaces only")

    return run


def has_one_port(stage: Stage) -> None:
    """It listens on no port besides the platform's."""
    ports = {row.port for row in stage.process.listening()}
    if len(ports) > 1:
        raise Failed(f"it listens on {sorted(ports)}: only one port is exposed")


def answers(call: Call, within_s: float) -> Run:
    """Return a check that two successive requests succeed in time."""

    def run(stage: Stage) -> None:
        for count in ("first", "second"):
            answer = must_answer(call(stage), f"the {count} request")
            if answer.total_s > stage.limit_s(within_s) * _SLOWEST:
                raise Failed(f"the {count} request took {answer.total_s:.1f} s: {within_s:g} s are the limit")

    return run


def refuses(path: Callable[[Stage], str], *words: str) -> Run:
    """Return a check that invalid bodies get a 4xx or 5xx in JSON with a key of ``words``."""

    def run(stage: Stage) -> None:
        for body in (b"{", b"\x00\xff no request"):
            answer = stage.ask("POST", path(stage), body, {"Content-Type": "application/json"})
            if not 400 <= answer.status < 600:
                raise Failed(f"an invalid body got {answer.shown}")
            if not any(f'"{word}"'.encode() in answer.body for word in words):
                raise Failed(f'the {answer.status} has no {{"{words[0]}": ...}}: {answer.shown}')

    return run


def admits(call: Call, concurrency: int, requests: int) -> Run:
    """Return a check that all requests admitted by a proxy, and the probes, are answered."""

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
    """The mounted folder is unchanged."""
    if stage.settings.model is None:
        raise Skipped("needs the model's folder: --model DIR")
    if stage.model_changed():
        raise Failed(f"a file under {stage.settings.model} changed while it served")


def serves_on(call: Call, seconds: float) -> Run:
    """Return a check that requests are answered for some seconds after SIGTERM."""

    def run(stage: Stage) -> None:
        process = stage.process
        must_answer(call(stage), "a request before SIGTERM")
        process.terminate()
        begin, count = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            answer = call(stage)
            at_s = time.monotonic() - begin
            if not 200 <= answer.status < 300 and at_s < seconds:  # later answers are not required
                process.wait(stage.grace_s)
                raise Failed(f"{at_s:.1f} s after SIGTERM, after {count} good answers: {answer.shown}")
            count += 1
            time.sleep(_PAUSE_S)
        process.wait(stage.grace_s)

    return run


def ends_in_time(stage: Stage) -> None:
    """It exits with status 0 within the grace period."""
    ending = stage.process.ending
    if ending is None:
        stage.process.terminate()
        ending = stage.process.wait(stage.grace_s)
    if ending.killed:
        raise Failed(f"it was still there {stage.grace_s:g} s after SIGTERM")
    if ending.status != 0:
        raise Failed(f"it ended with status {ending.status}: {stage.process.log_tail()}")


def instances(stage: Stage) -> list[Any]:
    """Return the instances of the user's predict request. Raises Skipped without any."""
    try:
        found = read_json(stage.body)["instances"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, list) or not found:
        raise Skipped('needs a request with instances: --body FILE with {"instances": [...]}')
    return found


def json_object(answer: HttpReply) -> dict[str, Any]:
    """Return the JSON object in a response. Raises Failed."""
    try:
        found = read_json(answer.body)
    except ValueError as error:
        raise Failed(f"not JSON: {answer.shown}") from error
    if not isinstance(found, dict):
        raise Failed(f"not a JSON object: {answer.shown}")
    return found


def must_answer(answer: HttpReply, what: str) -> HttpReply:
    """Return the response, or raise Failed unless its status is 2xx."""
    if not 200 <= answer.status < 300:
        raise Failed(f"{what}: {answer.shown}")
    return answer
