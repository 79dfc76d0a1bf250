"""Emulators of four platforms: a fault fails exactly the check that is there for it, and our own adapters pass all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import START_TIMEOUT_S
from remora_deploy.emulate import EmulateSettings, find_platform, generation
from remora_deploy.emulate.running import FAILED, PASSED, SKIPPED, Verdict, format_report, run_checks
from support.models.generation_models import tiny
from support.programs import faulty_generation as language
from support.servers.hosting import write_scale

SERVER = Path(__file__).parent / "faulty_container.py"
V1 = b'{"instances": [[1.0, 2.0, 3.0, 4.0]]}'
V2 = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
V2_PATH = "/v2/models/scale/infer"
FUNCTION = """
import numpy as np
import remora

@remora.model(batch=8)
def scale(x: remora.Array[np.float32, -1, 4]) -> remora.Array[np.float32, -1, 4]:
    return 2 * x
"""
BOTH: dict[str, set[str]] = {
    "": set(),
    "ends": {"starts", "ready"},
    "never-ready": {"ready"},
    "loopback": {"port"},
    "plain-error": {"bad-body"},
    "writes": {"model-read-only"},
    "stays": {"sigterm-exit"},
    "bad-status": {"sigterm-exit"},
}
WRITES = {fault: {"writes"} if expected == {"model-read-only"} else expected for fault, expected in BOTH.items()}
FAULTS: dict[str, dict[str, set[str]]] = {
    "azureml": {
        **BOTH,
        "slow-probe": {"probe-time"},
        "dead": {"liveness"},
        "no-ids": {"request-ids"},
        "long-ids": {"long-ids"},
        "strict": {"concurrency"},
        "never-answers": {"scoring", "request-ids", "concurrency"},
    },
    "cloud-run": {
        **{fault: expected for fault, expected in WRITES.items() if fault != "never-ready"},  # an open port is enough
        "never-listens": {"ready"},
        "own-port": {"port"},
        "first-request": {"first-request"},
        "http1-alone": {"grpc"},
        "strict": {"concurrency"},
        "never-answers": {"first-request", "requests", "concurrency"},
    },
    "knative": {
        **WRITES,
        "slow-probe": {"probe-time"},
        "own-port": {"port"},
        "second-port": {"one-port"},
        "first-request": {"first-request"},
        "failing-probe": {"probes"},
        "no-metrics": {"metrics"},
        "http1-alone": {"grpc"},
        "strict": {"admission"},
        "probe-while-busy": {"admission"},
        "stops-at-once": {"sigterm-serves-on"},
        "never-answers": {"first-request", "requests", "admission"},
    },
    "kserve": {
        **BOTH,
        "own-port": {"port"},
        "not-alive": {"v1-alive"},
        "unknown-503": {"v1-ready"},
        "drops-predictions": {"one-for-one"},
        "no-events": {"cloud-events"},
        "triton-health": {"v2-health"},
        "agent-body": {"agent"},
        "never-answers": {"predict", "one-for-one", "cloud-events"},
    },
    "vertex": {
        **BOTH,
        "bare-list": {"predictions"},
        "redirects": {"redirects"},
        "strict": {"load"},
        "never-answers": {"predict", "predictions", "redirects", "load"},
    },
}
ENDS = ("", "stays", "bad-status", "stops-at-once")
SERVES_ON = ("", "stops-at-once")
SLOW_ENDS = ("knative", "kserve")
"""Platforms whose adapters serve on for seconds after SIGTERM."""
PATIENCE = 15.0
"""A busy machine must not fail a check."""
STARTS = {"starts", "ready", "probe-time"}
LANGUAGE = [
    (platform, fault)
    for platform in FAULTS
    for fault in (language.FAULTS if platform == "azureml" else ("language", "no-usage", "holds-events"))
]
"""The checks are the same for all platforms, so that the faults of one show that each check finds its own."""
CASES = [(platform, fault) for platform, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("platform", "fault"), CASES)
def test_a_fault_fails_exactly_the_checks_that_are_there_for_it(platform: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    settings = EmulateSettings(
        command=(sys.executable, str(SERVER), platform),
        model=tmp_path / "model",
        body=V1,
        environ={"FAULT": fault},
        startup_s=1.0 if fault in ("never-ready", "never-listens") else START_TIMEOUT_S,
        patience=1.0 if fault == "slow-probe" else PATIENCE,
        given={"agent-model": "m", "path": V2_PATH} | ({"port-name": "h2c"} if fault == "http1-alone" else {}),
    )
    played = find_platform(platform)
    if fault == "stays":
        played = replace(played, grace_s=0.5 / PATIENCE)
    checks = {check.id for check in played.checks}
    if fault == "slow-probe":  # the others would be judged by the platform's own times
        checks &= STARTS
    if platform == "knative":  # its end takes seconds, which most faults have no part in
        checks -= set() if fault in ENDS else {"sigterm-exit"}
        checks -= set() if fault in SERVES_ON else {"sigterm-serves-on"}
    verdicts = run_checks(played, settings, checks)
    failed = {verdict.id for verdict in verdicts if verdict.outcome == FAILED}
    assert failed == FAULTS[platform][fault], [verdict for verdict in verdicts if verdict.outcome == FAILED]


@pytest.mark.parametrize(("platform", "fault"), LANGUAGE)
def test_a_fault_of_a_language_model_fails_exactly_its_checks(
    platform: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if language.FAULTS[fault]:  # a fault fails in each attempt
        monkeypatch.setattr(generation, "_ATTEMPTS_S", 0.0)
    command = (sys.executable, str(SERVER), platform)
    settings = EmulateSettings(command=command, environ={"FAULT": fault, "MODEL": "language"}, patience=PATIENCE)
    verdicts = run_checks(find_platform(platform), settings, language.CHECKS)
    assert {verdict.id for verdict in verdicts if verdict.outcome == SKIPPED} <= {"chat-cancel"}
    failed = {verdict.id for verdict in verdicts if verdict.outcome == FAILED}
    assert failed == language.FAULTS[fault], verdicts


@pytest.mark.parametrize("platform", FAULTS)
def test_every_check_has_a_fault_planted_for_it(platform: str) -> None:
    planted = {next(iter(expected)) for expected in FAULTS[platform].values() if len(expected) == 1} | {
        "starts", "requests", "predict", "scoring", *language.CHECKS
    }  # fmt: skip
    assert {check.id for check in find_platform(platform).checks} <= planted


def test_checks_that_cannot_apply_are_no_rows_of_the_report() -> None:
    passed = Verdict("ready", "it becomes ready", "", PASSED)
    given = Verdict("path", "it answers", "", SKIPPED, "needs --with path=PATH")
    other = Verdict("chat", "a chat is answered", "", SKIPPED, "needs a language model", applies=False)
    report = format_report("Knative", [passed, given, other])
    assert "chat" not in report
    assert "needs --with path=PATH" in report
    assert report.endswith("Knative: 1 passed, 0 failed, 1 skipped")
    assert "needs a language model" in format_report("Knative", [other])  # it is the only row


def test_a_server_without_a_language_model_has_no_chats_to_check() -> None:
    settings = EmulateSettings(command=(sys.executable, str(SERVER), "knative"), body=V2, startup_s=START_TIMEOUT_S)
    rows = run_checks(find_platform("knative"), settings, ["ready", "requests", "chat"])
    assert [(row.outcome, row.applies) for row in rows] == [(PASSED, True), (SKIPPED, True), (SKIPPED, False)]


def test_knatives_service_gets_no_requests_without_their_path() -> None:
    settings = EmulateSettings(command=(sys.executable, str(SERVER), "knative"), body=V2, startup_s=START_TIMEOUT_S)
    rows = {row.id: row for row in run_checks(find_platform("knative"), settings, ["ready", "requests", "bad-body"])}
    assert [rows[name].outcome for name in ("ready", "requests", "bad-body")] == [PASSED, SKIPPED, SKIPPED]
    assert "--with path=PATH" in rows["requests"].found


@pytest.mark.parametrize(
    ("platform", "body"), [("azureml", V2), ("cloud-run", V2), ("knative", V2), ("kserve", V1), ("vertex", V1)]
)
def test_our_own_adapters_pass_all_checks(
    platform: str, body: bytes, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    name = "a?b 50%41" if platform == "kserve" else "scale"
    write_scale(tmp_path / "models" / name)
    command = [sys.executable, "-m", f"remora_adapters.{platform.replace('-', '_')}"]
    if platform == "kserve":
        command += ["--model-control-mode=explicit", f"--load-model={name}"]
    settings = EmulateSettings(
        command=tuple(command),
        model=tmp_path / "models",
        body=body,
        environ={"PYTHONPATH": child_environment["PYTHONPATH"]},
        given={"agent-model": name, "port-name": "h2c", "path": V2_PATH},
        patience=PATIENCE,
    )
    verdicts = run_checks(find_platform(platform), settings)
    assert {verdict.id for verdict in verdicts if verdict.outcome != PASSED} == language.CHECKS, verdicts


@pytest.mark.parametrize("platform", [*FAULTS, "sagemaker"])
def test_a_language_model_on_our_own_adapters_passes_its_checks(
    platform: str, tmp_path: Path, child_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_ATTEMPTS_S", START_TIMEOUT_S)
    tiny(tmp_path / "models")
    settings = EmulateSettings(
        command=(sys.executable, "-m", f"remora_adapters.{platform.replace('-', '_')}"),
        model=tmp_path / "models",
        environ={"PYTHONPATH": child_environment["PYTHONPATH"], "SAGEMAKER_TRITON_ALLOW_METRICS": "true"},
        patience=PATIENCE,
    )
    verdicts = run_checks(find_platform(platform), settings, language.CHECKS)
    assert [(verdict.id, verdict.outcome, verdict.found) for verdict in verdicts] == [
        (name, PASSED, "") for name in ("chat", "chat-stream", "chat-cancel")
    ]


@pytest.mark.parametrize(
    ("platform", "body"),
    [("azureml", V2), ("cloud-run", V2), ("knative", V2), ("kserve", V1), ("sagemaker", V2), ("vertex", V1)],
)
def test_one_file_with_a_function_passes_all_checks_of_every_platform(
    platform: str, body: bytes, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "app.py").write_text(FUNCTION)
    settings = EmulateSettings(
        command=(sys.executable, "-m", f"remora_adapters.{platform.replace('-', '_')}"),
        model=models,
        body=body,
        environ={"PYTHONPATH": child_environment["PYTHONPATH"]},
        given={"port-name": "h2c", "path": V2_PATH},
        patience=PATIENCE,
    )
    played = find_platform(platform)
    checks = {check.id for check in played.checks}
    if platform in SLOW_ENDS:  # an adapter ends the same way whatever its models are
        checks -= {"sigterm-serves-on", "sigterm-exit"}
    verdicts = run_checks(played, settings, checks)
    # An agent loads models by name, and records are a format of the client's: both have tests with model files.
    assert {verdict.id for verdict in verdicts if verdict.outcome != PASSED} <= {
        "agent",
        "records",
        "streaming",
        *language.CHECKS,
    }
    assert len(verdicts) > 8


def test_a_scoring_script_on_our_adapter_passes_all_of_azures_checks(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    (tmp_path / "score.py").write_text(
        "import json\ndef init(): pass\ndef run(data): return json.loads(data)['inputs']\n"
    )
    (tmp_path / "model").mkdir()
    settings = EmulateSettings(
        command=(sys.executable, "-m", "remora_adapters.azureml"),
        model=tmp_path / "model",
        body=V2,
        environ={
            "PYTHONPATH": child_environment["PYTHONPATH"],
            "AML_APP_ROOT": str(tmp_path),
            "AZUREML_ENTRY_SCRIPT": "score.py",
        },
        patience=PATIENCE,
    )
    verdicts = run_checks(find_platform("azureml"), settings)
    assert {verdict.id for verdict in verdicts if verdict.outcome != PASSED} == language.CHECKS, verdicts
