"""The emulator against small servers, each right but for one fault: exactly the check that is meant for it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import START_TIMEOUT_S, free_ports
from remora.cli import main
from remora_deploy.emulate import PLATFORMS, EmulateSettings, Failed, find_platform
from remora_deploy.emulate.asking import Address, HttpReply, ask
from remora_deploy.emulate.running import FAILED, run_checks
from remora_deploy.emulate.sagemaker import PLATFORM, accepts_quickly
from remora_deploy.emulate.stage import Seen
from support.programs import faulty_generation as language

SERVER = Path(__file__).parent / "faulty_sagemaker.py"
BODY = b'{"numbers": [1, 2]}'
PATIENCE = 15.0
"""A busy machine must not fail a check."""
STARTS = ("serve-argument", "ready", "ping-time")
FAULTS = {
    "": set(),
    "no-serve": {"serve-argument"},
    "never-ready": {"ready"},
    "slow-ping": {"ping-time"},
    "ping-body": {"ping-empty"},
    "own-port": {"bind-to-port"},
    "loopback": {"all-interfaces"},
    "stray-port": {"safe-ports"},
    "early-ready": {"ready-means-ready"},
    "gzip": {"invocations"},
    "strict-headers": {"platform-headers"},
    "attributes": {"custom-attributes"},
    "bad-body": {"bad-body"},
    "large-body": {"largest-body"},
    "ping-while-busy": {"ping-under-load"},
    "buffers": {"streaming"},
    "execution-parameters": {"execution-parameters"},
    "loses-records": {"records"},
    "shuffles": {"records"},
    "writes": {"model-read-only"},
    "drops": {"sigterm-drain"},
    "stays": {"sigterm-exit"},
    "bad-status": {"sigterm-exit"},
}


def settings(tmp_path: Path, fault: str) -> EmulateSettings:
    model, stream = tmp_path / "model", tmp_path / "stream.json"
    model.mkdir()
    (model / "weights").write_text("1")
    stream.write_text('{"stream": true}')
    (tmp_path / "records.csv").write_text("1\n2\n3\n")
    (tmp_path / "slow.json").write_text('{"slow": true}')
    return EmulateSettings(
        command=(sys.executable, str(SERVER)),
        model=model,
        body=BODY,
        environ={"FAULT": fault},
        startup_s=1.0 if fault == "never-ready" else START_TIMEOUT_S,
        patience=1.0 if fault == "slow-ping" else PATIENCE,
        given={
            "stream-body": str(stream),
            "slow-body": str(tmp_path / "slow.json"),
            "records": str(tmp_path / "records.csv"),
        },
    )


@pytest.mark.parametrize(("fault", "expected"), FAULTS.items(), ids=lambda value: value or "none")
def test_a_fault_fails_exactly_the_check_that_is_there_for_it(fault: str, expected: set[str], tmp_path: Path) -> None:
    platform = replace(PLATFORM, grace_s=0.5 / PATIENCE if fault == "stays" else PLATFORM.grace_s)
    # What comes after a slow ping would be judged by the platform's own times.
    verdicts = run_checks(platform, settings(tmp_path, fault), STARTS if fault == "slow-ping" else ())
    failed = {verdict.id for verdict in verdicts if verdict.outcome == FAILED}
    assert failed == expected, [verdict for verdict in verdicts if verdict.outcome == FAILED]


@pytest.mark.parametrize(("fault", "expected"), language.FAULTS.items())
def test_a_fault_of_a_language_model_fails_exactly_its_checks(fault: str, expected: set[str]) -> None:
    environ = {"FAULT": fault, "MODEL": "language"}
    found = EmulateSettings(command=(sys.executable, str(SERVER)), environ=environ, patience=PATIENCE)
    verdicts = run_checks(PLATFORM, found, language.CHECKS)
    assert {verdict.id for verdict in verdicts if verdict.outcome == FAILED} == expected, verdicts


def test_every_check_but_the_one_that_needs_a_full_backlog_has_a_fault_planted_for_it() -> None:
    assert {check.id for check in PLATFORM.checks} - set().union(*FAULTS.values()) == {"accept-time", *language.CHECKS}


def test_connections_that_wait_fail_the_check_of_their_time() -> None:
    boot = [Seen(0.0, HttpReply(200, {}, b"", connect_s=0.4))]
    stage: Any = SimpleNamespace(boot=boot, limit_s=lambda seconds: seconds)
    with pytest.raises(Failed, match="400 ms"):
        accepts_quickly(stage)
    accepts_quickly(SimpleNamespace(boot=boot, limit_s=lambda seconds: 2 * seconds))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_has_checks_with_unique_ids_and_reasons(name: str) -> None:
    checks = find_platform(name).checks
    assert len({check.id for check in checks}) == len(checks)
    assert all(check.what and check.why for check in checks)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["emulate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_what_was_seen_and_why_it_matters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["--", sys.executable, str(SERVER)]
    code, out, _ = run(capsys, "sagemaker", "--env", "FAULT=ping-body", "--patience", "15", *command)
    assert code == 1
    assert "FAILED   ping-empty" in out
    assert "seen: /ping has a body of 4 bytes" in out
    assert "why it matters: " in out
    assert "needs an inference request: --body FILE" in out


def test_the_command_ends_with_0_when_no_check_failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "body.json").write_bytes(BODY)
    code, out, _ = run(
        capsys, "sagemaker", "--body", str(tmp_path / "body.json"), "--only", "invocations", "--format", "json",
        "--", sys.executable, str(SERVER),
    )  # fmt: skip
    assert code == 0
    assert [row["outcome"] for row in json.loads(out)] == ["passed"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sagemaker"], "pass the server's URL"),
        (["sagemaker", "https://example.org"], "plain HTTP"),
        (["sagemaker", "http://127.0.0.1:1", "serve"], "unexpected arguments after a URL target"),
        (["sagemaker", "--env", "A", "http://127.0.0.1:1"], "expected NAME=VALUE"),
        (["sagemaker", "--only", "pong", "http://127.0.0.1:1"], "no check pong"),
        (["sagemaker", "--", "/no/such/program"], "No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_ends_with_2_and_says_why(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert said in err


def test_an_unknown_platform_is_refused_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["emulate", "mainframe", "http://127.0.0.1:1"])
    assert "sagemaker" in capsys.readouterr().err


def test_the_checks_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "sagemaker", "--list")
    assert code == 0
    assert "sigterm-exit: it exits with status 0 within 30 s of SIGTERM" in out


def test_the_command_can_be_the_api_for_real_clients(tmp_path: Path, child_environment: dict[str, str]) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "remora", "emulate", "sagemaker", "--api", str(port), "--", sys.executable, SERVER]
    with subprocess.Popen(command, env=child_environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}" in process.stdout.readline()
        answer = ask(Address("127.0.0.1", port), "POST", "/endpoints/e/invocations", body=BODY)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_TIMEOUT_S) == 0
    assert (answer.status, json.loads(answer.body)) == (200, {"numbers": [2, 4]})
