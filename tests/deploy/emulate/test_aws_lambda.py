"""The emulator of Lambda: a fault fails exactly the check that is there for it, and our own handler passes all."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import ROOT, START_TIMEOUT_S
from remora.cli import main
from remora_deploy.emulate import EmulateSettings, aws_lambda, find_platform
from remora_deploy.emulate.lambda_runtime import ANSWER_BYTES, RuntimeApi
from remora_deploy.emulate.running import FAILED, PASSED, run_checks
from support.programs import faulty_generation as language
from support.servers.hosting import write_scale, write_words

PLATFORM = find_platform("lambda")
CLIENT = Path(__file__).parent / "faulty_lambda.py"
AWS_CLIENT = Path(os.environ.get("REMORA_LAMBDA_VENV", ROOT / ".venv-lambda")) / "bin" / "python"
BODY = b'{"numbers": [1, 2]}'
PATIENCE = 10.0
"""A busy machine must not fail a check; the model `slow` takes longer than the deadline all the same."""
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
SLOW = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(60)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(1, np.float32))]) for _ in requests]
"""
SLOW_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
FAULTS: dict[str, set[str]] = {
    "": set(),
    "ends": {"starts"},
    "never-ready": {"init"},
    "silent-init": {"init-error"},
    "restore": {"snapshot"},
    "once": {"invocations"},
    "http": {"http"},
    "stream": {"stream"},
    "plain-error": {"bad-event"},
    "large-event": {"largest-event"},
    "long-answer": {"answer-size"},
    "late": {"deadline"},
    "frozen": {"freeze"},
    "early": {"one-at-a-time"},
    "stray": {"request-ids"},
    "writes": {"model-read-only"},
    "stays": {"sigterm-exit"},
}
UNHURT = {
    "once": {"starts", "init", "init-error", "invocations"},
    "large-event": {"starts", "init", "init-error", "invocations", "http", "bad-event", "largest-event"},
}
"""Faults after which nothing more is answered: what is looked at up to there."""


def given(folder: Path, **bodies: object) -> dict[str, str]:
    """Bodies as the files that ``--with`` names."""
    found = {}
    for name, body in bodies.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
        found[f"{name}-body"] = str(folder / f"{name}.json")
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_exactly_the_check_that_is_there_for_it(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws_lambda, "FREEZE_S", 0.2)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights").write_text("1")
    settings = EmulateSettings(
        command=(sys.executable, str(CLIENT)),
        model=tmp_path / "models",
        body=BODY,
        environ={"FAULT": fault},
        startup_s=1.0 if fault == "never-ready" else START_TIMEOUT_S,
        patience=1.0 if fault == "late" else PATIENCE,
        given={"path": "/double", "stream-path": "/stream", **given(tmp_path, slow={"slow": 1}, large={"long": 1})},
    )
    ids = [check.id for check in PLATFORM.checks if check.id in UNHURT.get(fault, {check.id})]
    if fault == "late":  # its end would be judged by the platform's own time
        ids.remove("sigterm-exit")
    verdicts = run_checks(
        replace(PLATFORM, grace_s=0.5 / PATIENCE) if fault == "stays" else PLATFORM,
        settings,
        ids,
    )
    failed = {verdict.id for verdict in verdicts if verdict.outcome == FAILED}
    assert failed == FAULTS[fault], [verdict for verdict in verdicts if verdict.outcome == FAILED]


def test_every_check_has_a_fault_planted_for_it() -> None:
    assert {check.id for check in PLATFORM.checks} - {"chat", "chat-stream"} == set().union(*FAULTS.values())


@pytest.mark.parametrize("fault", language.FAULTS)
def test_a_fault_of_a_language_model_fails_exactly_its_checks(fault: str) -> None:
    command, environ = (sys.executable, str(CLIENT)), {"FAULT": fault, "MODEL": "language"}
    settings = EmulateSettings(
        command=command, model=Path(__file__).parent, environ=environ, startup_s=START_TIMEOUT_S, patience=PATIENCE
    )
    verdicts = run_checks(PLATFORM, settings, ["chat", "chat-stream"])
    failed = {verdict.id for verdict in verdicts if verdict.outcome == FAILED}
    assert failed == language.FAULTS[fault] - {"chat-cancel"}, verdicts


@pytest.mark.parametrize("client", ["ours", "awslambdaric"])
def test_our_own_handler_passes_all_checks(client: str, tmp_path: Path) -> None:
    if client == "awslambdaric" and not AWS_CLIENT.exists():
        pytest.skip("AWS's runtime client is not installed: make test-lambda")
    models = tmp_path / "models"
    write_scale(models / "scale")
    write_words(models / "words")
    (models / "slow" / "1").mkdir(parents=True)
    (models / "slow" / "1" / "model.py").write_text(SLOW)
    (models / "slow" / "config.pbtxt").write_text(SLOW_CONFIG)
    start = (sys.executable, str(CLIENT)) if client == "ours" else (str(AWS_CLIENT), "-m", "awslambdaric")
    words = {"name": "x", "datatype": "BYTES", "shape": [1], "data": ["é" * 1_050_000]}
    late = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    bodies = given(
        tmp_path, slow={"model_name": "slow", "inputs": [late]}, large={"model_name": "words", "inputs": [words]}
    )
    settings = EmulateSettings(
        command=(*start, "remora_adapters.aws_lambda.handler"),
        model=models,
        body=json.dumps({**REQUEST, "model_name": "scale"}).encode(),
        environ={"PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'adapters'}"},
        startup_s=START_TIMEOUT_S,
        patience=PATIENCE,
        given={"path": "/v2/models/scale/infer", **bodies},
    )
    verdicts = run_checks(PLATFORM, settings)
    assert [verdict.id for verdict in verdicts if verdict.outcome != PASSED] == ["stream", "chat", "chat-stream"], (
        "only remora's client streams, and there is no language model"
    )


def test_a_url_is_refused_since_a_function_is_never_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "lambda", "http://127.0.0.1:1"]) == 2
    assert "pass the command that starts it" in capsys.readouterr().err


def test_a_reply_is_taken_once_and_a_late_reply_is_not_a_stray() -> None:
    with RuntimeApi(0) as api:
        first = api.send_event(b"1", 60)
        assert api.next_event() is first
        assert api.next_event() is None
        assert api.accept_reply("another", b"{}", error=False) == 400
        assert api.accept_reply(first.id, b"{}", error=False) == 202
        assert api.accept_reply(first.id, b"{}", error=False) == 400
        late = api.send_event(b"2", 60)
        api.drop(late)
        assert api.accept_reply(late.id, b"{}", error=False) == 400
        assert (api.observed.early, api.observed.strays) == (1, ["another", first.id])


def test_an_answer_that_is_too_long_becomes_the_platforms_error() -> None:
    with RuntimeApi(0) as api:
        invocation = api.send_event(b"1", 60)
        api.next_event()
        assert api.accept_reply(invocation.id, b"x" * (ANSWER_BYTES + 1), error=False) == 413
        assert invocation.reply is not None
        assert json.loads(invocation.reply.body)["errorType"] == "Function.ResponseSizeTooLarge"
