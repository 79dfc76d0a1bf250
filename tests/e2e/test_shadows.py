"""Shadows of a real server: streams, sequences, front processes, a shadow that hangs, and a swap of the primary."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from conftest import free_ports
from remora_tools.rollout.recordings import MAX_WAITING
from support.models.generation_models import tiny
from support.models.released_model import infer, release, release_server
from support.process.eventually import eventually
from support.servers.hosting import ask
from support.servers.live_server import PATIENCE_S, SEQUENCES, STREAM, process, replace, until, write_version

AT_ANY_TIME = "--shadow-processors=1"
FRONTS = pytest.param("--frontends=2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))
STREAMING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for value in {values}:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * value)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SUMMING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {{}}

    def execute(self, requests):
        answers = []
        for request in requests:
            number = request.correlation_id()
            start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            self.sums[number] = array + (0 if start else self.sums.get(number, 0))
            found = self.sums[number]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", {found})]))
        return answers
"""


def _write(repository: Path, number: int, config: str, model: str, name: str = "m") -> None:
    folder = repository / name / str(number)
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(config)
    (folder / "model.py").write_text(model)


def _shadow(port: int, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Wait until the shadow's counts are as wanted, and return them."""
    return eventually(lambda: row if wanted(row := release(port)["shadow"]) else None)


def _infer(port: int, value: int = 1, name: str = "m", **parameters: Any) -> int:
    return infer(port, name, value, parameters=parameters)[0]


def _streamed(port: int) -> list[int]:
    """Return the values of an event stream."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/m/generate_stream",
        json.dumps({"IN": 1}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        assert reply.headers["x-model-version"] is None
        return [int(value) for value in re.findall(r'"OUT": ?\[?(\d+)', reply.read().decode())]


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_event_streams_are_copied_and_compared_answer_by_answer(
    fronts: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    for number, values in enumerate(("(1, 2, 3)", "(1, 2, 3)", "(1, 5, 3)", "(1, 2)"), start=1):
        _write(tmp_path / "models", number, STREAM, STREAMING.format(values=values))
    (tmp_path / "models" / "m" / "release.yaml").write_text("stable: 1\n")
    with release_server(tmp_path / "models", child_environment, AT_ANY_TIME, fronts) as port:
        for version, sample in (
            (2, None),
            (3, "answer 2: OUT: 1 of 1 elements differ, by at most 3"),
            (4, "answers: 2, expected 3"),
        ):
            release(port, "shadow", version=version)
            assert _streamed(port) == [1, 2, 3]
            found = _shadow(port, lambda row: row["compared"] == 1)
            assert (found["failed"], found["samples"]) == (0, [sample] if sample else [])


def test_grpc_streams_are_copied(tmp_path: Path, child_environment: dict[str, str]) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    for number, values in enumerate(("(1, 2)", "(1, 9)"), start=1):
        _write(tmp_path / "models", number, STREAM, STREAMING.format(values=values))
    (tmp_path / "models" / "m" / "release.yaml").write_text("stable: 1\nshadow: {version: 2}\n")
    http, port = free_ports(2)
    flags = (AT_ANY_TIME, "--allow-grpc=true", f"--grpc-port={port}")
    with process(tmp_path / "models", http, child_environment, *flags) as server:
        until(http, "/readyz", server)
        answers: Queue[Any] = Queue()
        with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            tensor = grpc.InferInput("IN", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[1]], np.int32))
            client.async_stream_infer("m", [tensor], request_id="r")
            found = [answers.get(timeout=PATIENCE_S) for _ in range(2)]
            client.stop_stream()
        assert [(result.as_numpy("OUT").item(), error) for result, error in found] == [(1, None), (2, None)]
        shadow = _shadow(http, lambda row: row["compared"] == 1)
        assert shadow["samples"] == ["r: answer 2: OUT: 1 of 1 elements differ, by at most 7"]


def test_streams_are_not_copied_to_another_server(tmp_path: Path, child_environment: dict[str, str]) -> None:
    _write(tmp_path / "models", 1, STREAM, STREAMING.format(values="(1,)"))
    with release_server(
        tmp_path / "models", child_environment, AT_ANY_TIME, "--shadow-url=there=http://127.0.0.1:9"
    ) as port:
        refused = ask(port, "POST", "/v2/models/m/release", {"action": "shadow", "url": "there"}, {})
        assert refused.status == 400
        assert (
            "model 'm' is decoupled: copies of its streams can go to a version or another model"
            in refused.body.decode()
        )
        assert release(port)["stage"] == "none"
    (tmp_path / "models" / "m" / "release.yaml").write_text("stable: 1\nshadow: {url: there}\n")
    with release_server(
        tmp_path / "models", child_environment, AT_ANY_TIME, "--shadow-url=there=http://127.0.0.1:9"
    ) as port:
        assert _streamed(port) == [1]
        found = release(port)["shadow"]
        assert "is decoupled" in found["warning"]
        assert (found["compared"], found["dropped"]) == (0, 0)


# -- sequences --------------------------------------------------------------------------------------------------------


def _ask_sequence(
    port: int, number: int, *values: int, start: bool = True, end: bool = True, name: str = "m"
) -> list[int]:
    return [
        _infer(
            port,
            value,
            name,
            sequence_id=number,
            sequence_start=start and at == 0,
            sequence_end=end and at == len(values) - 1,
        )
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize("where", ["version", "model", "server"])
def test_sequences_are_copied_whole_beside_those_of_clients(
    where: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    models, theirs = tmp_path / "models", tmp_path / "theirs"
    odd = SUMMING.format(found="found + (found == 9)")  # differs in the third request of sequence 70
    _write(models, 2, SEQUENCES, SUMMING.format(found="found"))
    _write(theirs if where == "server" else models, 1, SEQUENCES, odd, "other" if where == "model" else "m")
    if where == "version":
        (models / "m" / "release.yaml").write_text("stable: 2\n")
    with ExitStack() as stack:
        flags, other = [AT_ANY_TIME], 0
        if where == "server":
            other = stack.enter_context(release_server(theirs, child_environment))
            flags.append(f"--shadow-url=there=http://127.0.0.1:{other}")
        port = stack.enter_context(release_server(models, child_environment, *flags))
        shadow: dict[str, Any] = {"version": {"version": 1}, "model": {"model": "other"}, "server": {"url": "there"}}
        at_shadow, name = {"version": (port, "m/versions/1"), "model": (port, "other")}.get(where, (other, "m"))
        _ask_sequence(port, 7, 5, end=False)
        release(port, "shadow", **shadow[where])
        assert _ask_sequence(port, 7, 1, 1, start=False) == [6, 7]  # it began before the shadow
        assert _ask_sequence(at_shadow, 9, 100, end=False, name=name) == [100]  # the same id as the next
        assert _ask_sequence(port, 9, 1, 2, 3) == [1, 3, 6]
        found = _shadow(port, lambda row: row["compared"] == 1)
        assert (found["differing"], found["failed"], found["dropped"]) == (0, 0, 0)
        assert _ask_sequence(at_shadow, 9, 1, start=False, name=name) == [101]
        assert _ask_sequence(port, 70, 2, 3, 4) == [2, 5, 9]
        found = _shadow(port, lambda row: row["compared"] == 2)
        assert found["samples"] == ["request 3 of the sequence: OUT: 1 of 1 elements differ, by at most 1"]


def test_a_shadow_that_is_the_canary_gets_no_sequences(tmp_path: Path, child_environment: dict[str, str]) -> None:
    for number in (1, 2):
        _write(tmp_path / "models", number, SEQUENCES, SUMMING.format(found="found"))
    (tmp_path / "models" / "m" / "release.yaml").write_text("stable: 2\ncanary: 1\nweight: 0\nshadow: {version: 1}\n")
    with release_server(tmp_path / "models", child_environment, AT_ANY_TIME) as port:
        assert _ask_sequence(port, 9, 1, 2, 3) == [1, 3, 6]
        found = release(port)["shadow"]
        assert (found["compared"], found["dropped"]) == (0, 0)
        assert found["warning"] == "the shadow gets no sequences, because clients begin sequences at the same version"


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_shadow_that_hangs_costs_no_answer(tmp_path: Path, child_environment: dict[str, str]) -> None:
    gate, began = tmp_path / "gate", tmp_path / "began"
    os.mkfifo(gate)
    write_version(tmp_path / "models", 2)
    write_version(tmp_path / "models", 3, name="hangs")
    file = tmp_path / "models" / "hangs" / "3" / "model.py"
    hang = f"open({str(began)!r}, 'w').close()\n        open({str(gate)!r}).read()\n        arrays = ["
    file.write_text(file.read_text().replace("arrays = [", hang))
    with release_server(tmp_path / "models", child_environment, AT_ANY_TIME) as port:
        release(port, "shadow", model="hangs")
        assert _infer(port) == 2
        eventually(began.exists)
        assert {_infer(port) for _ in range(MAX_WAITING + 135)} == {2}
        found = _shadow(port, lambda row: row["dropped"] == 135)
        assert (found["compared"], found["differing"]) == (0, 0)
        release(port, "shadow")  # ends it
        assert _infer(port) == 2
        gate.write_text("")


def test_a_shadow_whose_process_crashes_costs_no_answer(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 2)
    write_version(tmp_path / "models", 3)
    (tmp_path / "models" / "m" / "release.yaml").write_text("stable: 2\n")
    file = tmp_path / "models" / "m" / "3" / "model.py"
    file.write_text(file.read_text().replace("arrays = [", "import os; os._exit(3)\n        arrays = ["))
    flags = (AT_ANY_TIME, "--backend-config=python,isolation=process")
    with release_server(tmp_path / "models", child_environment, *flags) as port:
        release(port, "shadow", version=3)
        assert {_infer(port) for _ in range(20)} == {2}
        found = _shadow(port, lambda row: row["failed"] > 0)
        assert "its process ended with exit code 3" in found["samples"][-1]
        assert {_infer(port) for _ in range(20)} == {2}
        assert ask(port, "GET", "/v2/health/ready").status == 200


def test_a_function_that_raises_costs_no_answer(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 2)
    write_version(tmp_path / "models", 3)
    (tmp_path / "models" / "m" / "release.yaml").write_text("stable: 2\n")
    (tmp_path / "compare.py").write_text("def bad(expected, found):\n    raise KeyError('no')\n")
    flags = (AT_ANY_TIME, f"--shadow-compare=bad={tmp_path / 'compare.py'}:bad")
    with release_server(tmp_path / "models", child_environment, *flags) as port:
        release(port, "shadow", version=3, compare="bad")
        assert {_infer(port) for _ in range(5)} == {2}
        (sample, *_) = _shadow(port, lambda row: row["samples"])["samples"]
        assert sample == "the answers cannot be compared: KeyError: 'no'"
        assert {_infer(port) for _ in range(5)} == {2}


def test_stored_differences_are_bounded(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 2)
    write_version(tmp_path / "models", 3)
    (tmp_path / "models" / "m" / "release.yaml").write_text("stable: 2\nshadow: {version: 3}\n")
    kept = tmp_path / "differences.jsonl"
    flags = (AT_ANY_TIME, f"--shadow-differences={kept}", "--shadow-differences-max-bytes=1000")
    with release_server(tmp_path / "models", child_environment, *flags) as port:
        for count in range(1, 9):
            assert _infer(port) == 2
            _shadow(port, lambda row, least=count: row["differing"] >= least)
    rows = kept.read_text().splitlines()
    assert 0 < len(rows) < 8
    assert kept.stat().st_size <= 1000
    assert all(json.loads(row)["found"][0]["data"] == [3] for row in rows)


def test_a_swap_of_the_primary_keeps_its_shadow(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 2)
    write_version(tmp_path / "models", 3, name="other")
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with release_server(tmp_path / "models", child_environment, AT_ANY_TIME, *flags) as port:
        release(port, "shadow", model="other")
        assert _infer(port) == 2
        _shadow(port, lambda row: row["compared"] == 1)
        file = tmp_path / "models" / "m" / "2" / "model.py"
        replace(file, file.read_text().replace("self.factor = 2", "self.factor = 3"))
        eventually(lambda: _infer(port) == 3)
        counts = release(port)["shadow"]
        assert counts["differing"] > 0
        assert _infer(port) == 3
        _shadow(port, lambda row: row["compared"] - row["differing"] >= 1)


def _answers(arms: list[dict[str, Any]]) -> int:
    return sum(arm.get("answers", 0) for arm in arms)


# -- other front ends -------------------------------------------------------------------------------------------------


def test_another_server_gets_the_plain_name_of_a_model_with_a_namespace(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    write_version(tmp_path / "models", 2)
    write_version(tmp_path / "theirs", 7)
    with (
        release_server(tmp_path / "theirs", child_environment) as other,
        release_server(
            tmp_path / "models",
            child_environment,
            AT_ANY_TIME,
            "--model-namespacing=true",
            f"--shadow-url=there=http://127.0.0.1:{other}",
        ) as port,
    ):
        release(port, "shadow", url="there")
        assert _infer(port) == 2
        found = _shadow(port, lambda row: row["compared"] == 1)
        assert (found["failed"], found["samples"]) == (0, ["OUT: 1 of 1 elements differ, by at most 5"])


@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_answers_of_language_models_count_for_their_version(
    fronts: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    first = tiny(tmp_path / "models")
    shutil.copytree(first, first.parent / "2")
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}
    with release_server(tmp_path / "models", child_environment, AT_ANY_TIME, fronts) as port:
        release(port, "start", "tiny", version=1, weight="50%", sticky="header:X-User")
        served = []
        for user in range(24):
            reply = ask(port, "POST", "/v1/completions", {**body, "stream": user % 2 == 0}, {"X-User": f"user {user}"})
            assert reply.status == 200, reply.body
            served.append(reply)
        refused = ask(port, "POST", "/v1/completions", {**body, "max_tokens": -1}, {"X-User": "user 0"})
        assert refused.status == 400
        arms = eventually(lambda: rows if _answers(rows := release(port, name="tiny")["arms"]) >= len(served) else None)
        assert all(arm["answers"] > 0 and arm["errors"] == 0 for arm in arms), arms
        release(port, "shadow", "tiny", version=1)
        assert release(port, name="tiny")["shadow"]["warning"] == "the shadow gets no requests of OpenAI's routes"
