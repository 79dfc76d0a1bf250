"""The emulator against the real process: an endpoint as the platform starts, probes, calls and ends it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from remora_deploy.emulate import EmulateSettings, find_platform
from remora_deploy.emulate.running import FAILED, SKIPPED, Verdict, run_checks
from support.servers.hosting import write_scale
from support.servers.sagemaker_door import COUNTER, COUNTS, V2, python_model

ENTRY = (sys.executable, "-m", "remora_adapters.sagemaker")
OF_LANGUAGE_MODELS = ("chat", "chat-stream", "chat-cancel")


def wrong(verdicts: list[Verdict], *may_skip: str) -> list[Verdict]:
    """What failed, and what was skipped without being expected to."""
    return [row for row in verdicts if row.outcome == FAILED or (row.outcome == SKIPPED and row.id not in may_skip)]


def test_every_check_of_an_endpoint_with_one_model_passes(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_scale(tmp_path / "model" / "scale")
    (tmp_path / "records.csv").write_text("".join(f"{row},0,0,1\n" for row in range(100)))
    settings = EmulateSettings(
        command=ENTRY,
        model=tmp_path / "model",
        body=V2,
        environ=child_environment,
        startup_s=60.0,
        given={"records": str(tmp_path / "records.csv")},
    )
    assert not wrong(run_checks(find_platform("sagemaker"), settings), "streaming", *OF_LANGUAGE_MODELS)


def test_every_check_of_a_multi_model_endpoint_passes(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_scale(tmp_path / "model" / "scale")
    (tmp_path / "model" / "scale" / "1" / "more").write_bytes(b"0" * (5 << 20))
    full = tmp_path / "full" / "m"
    python_model(full, COUNTS, "class TritonPythonModel:\n    def initialize(self, args):\n        raise MemoryError\n")
    with (full / "1" / "model.py").open("a") as file:
        file.write("    def execute(self, requests):\n        return []\n")
    settings = EmulateSettings(
        command=ENTRY,
        model=tmp_path / "model",
        body=V2,
        environ=child_environment,
        startup_s=60.0,
        given={"oom-model": str(tmp_path / "full")},
    )
    assert not wrong(run_checks(find_platform("sagemaker-mme"), settings))


def test_a_stream_leaves_piece_by_piece(tmp_path: Path, child_environment: dict[str, str]) -> None:
    python_model(tmp_path / "model" / "counter", COUNTS, COUNTER)
    body = tmp_path / "body.json"
    body.write_bytes(json.dumps({"x": 1}).encode())
    environ = child_environment | {"SAGEMAKER_TRITON_INFERENCE_TYPE": "generate_stream"}
    settings = EmulateSettings(
        command=ENTRY,
        model=tmp_path / "model",
        body=body.read_bytes(),
        environ=environ,
        startup_s=60.0,
        given={"stream-body": str(body)},
    )
    assert not wrong(run_checks(find_platform("sagemaker"), settings, ["streaming", "invocations", "sigterm-exit"]))


@pytest.mark.parametrize("variable", ["SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_BIND_TO_PORT"])
def test_settings_that_make_no_sense_end_the_process_with_a_reason(
    variable: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    write_scale(tmp_path / "model" / "scale")
    environ = child_environment | {variable: "nowhere"}
    settings = EmulateSettings(command=ENTRY, model=tmp_path / "model", environ=environ, startup_s=60.0)
    verdicts = {row.id: row for row in run_checks(find_platform("sagemaker"), settings)}
    assert verdicts["serve-argument"].outcome == FAILED
    assert f"{variable}=nowhere" in verdicts["serve-argument"].found
