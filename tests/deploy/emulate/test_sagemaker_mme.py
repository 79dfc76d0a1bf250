"""The multi-model checks against small servers, each right but for one fault: exactly the check meant for it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from conftest import START_TIMEOUT_S, free_ports
from remora.cli import main
from remora_deploy.emulate import EmulateSettings
from remora_deploy.emulate.running import FAILED, SKIPPED, run_checks
from remora_deploy.emulate.sagemaker_mme import MODELS, PLATFORM
from support.servers.hosting import write_scale
from support.servers.sagemaker_door import V2, runtime_client

SERVER = Path(__file__).parent / "faulty_sagemaker_mme.py"
FAULTS = {
    "": set(),
    "needs-model": {"ready"},
    "list-null": {"list-empty"},
    "no-load": {"load"},
    "bad-show": {"show"},
    "load-again": {"load-again"},
    "by-target": {"invoke"},
    "unknown-400": {"unknown"},
    "shared": {"apart"},
    "any-url": {"below-root"},
    "bad-500": {"bad-load"},
    "blocks": {"ping-while-loading"},
    "stale": {"unload"},
    "leaks": {"memory"},
    "oom-400": {"out-of-memory"},
}


@pytest.mark.parametrize(("fault", "expected"), FAULTS.items(), ids=lambda value: value or "none")
def test_a_fault_fails_exactly_the_check_that_is_there_for_it(fault: str, expected: set[str], tmp_path: Path) -> None:
    for name in ("model", "large"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1" * (8 << 20))
    (tmp_path / "large" / "too-large").write_text("")
    settings = EmulateSettings(
        command=(sys.executable, str(SERVER)),
        model=tmp_path / "model",
        body=b"[1]",
        # The second keeps the allocator from holding on to a model of the miniature for the next one.
        environ={"FAULT": fault, "MALLOC_MMAP_THRESHOLD_": "65536"},
        startup_s=1.0 if fault == "needs-model" else START_TIMEOUT_S,
        patience=15.0,
        given={"oom-model": str(tmp_path / "large")},
    )
    verdicts = run_checks(PLATFORM, settings)
    assert {row.id for row in verdicts if row.outcome == FAILED} == expected, verdicts
    if not fault:
        assert not [row for row in verdicts if row.outcome == SKIPPED]


def test_every_check_of_the_multi_model_api_has_a_fault_planted_for_it() -> None:
    assert {check.id for check in MODELS} <= set().union(*FAULTS.values())


def test_without_a_folder_or_a_body_the_checks_that_need_one_are_skipped_with_the_reason() -> None:
    settings = EmulateSettings(command=(sys.executable, str(SERVER)), startup_s=START_TIMEOUT_S)
    rows = {row.id: row for row in run_checks(PLATFORM, settings, ["load", "unknown", "memory"])}
    assert (rows["load"].outcome, rows["unknown"].outcome) == (SKIPPED, "passed")
    assert "--model DIR" in rows["load"].found


def test_real_clients_reach_the_models_of_archives_by_their_targets(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[dev]'")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
    archives = tmp_path / "archives"
    write_scale(archives / "folder" / "scale")
    (archives / "team").mkdir()
    with tarfile.open(archives / "team" / "one.tar.gz", "w:gz") as packed:
        packed.add(archives / "folder", ".")
    (archives / "broken.tar.gz").write_bytes(b"no archive")
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "remora", "emulate", "sagemaker-mme", "--api", str(port)]
    words += ["--with", f"archives={archives}", "--", sys.executable, "-m", "remora_adapters.sagemaker"]
    with subprocess.Popen(words, env=child_environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert f"http://127.0.0.1:{port}" in process.stdout.readline()
            with runtime_client(port) as client:

                def invoke(target: str) -> Any:
                    answer = client.invoke_endpoint(
                        EndpointName="e", Body=V2, ContentType="application/json", TargetModel=target
                    )
                    return json.loads(answer["Body"].read())

                for target in ("team/one.tar.gz", "folder", "team/one.tar.gz"):
                    assert invoke(target)["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
                for target in ("none.tar.gz", "../archives", "team/../../secret", "broken.tar.gz", "."):
                    with pytest.raises(client.exceptions.ClientError, match="cannot unpack model"):
                        invoke(target)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0


def test_the_api_asks_for_the_folder_of_archives(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["emulate", "sagemaker-mme", "--api", "1", "--", sys.executable, str(SERVER)]
    assert main(command) == 2
    assert "--with archives=DIR" in capsys.readouterr().err
