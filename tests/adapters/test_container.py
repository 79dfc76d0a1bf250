"""The plain container: where its models are, and that Triton's command line starts it."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from conftest import end, free_ports, wait_until_ready
from remora import Engine
from remora_adapters import container
from support.process.eventually import eventually


def test_it_listens_on_all_interfaces_at_tritons_ports() -> None:
    server = container.host({}).server
    assert server.http_address == "0.0.0.0"
    assert (server.http_port, server.grpc_port, server.metrics_port) == (8000, 8001, 8002)


@pytest.mark.parametrize("place", ["/somewhere/models", "s3://bucket/models"])
def test_the_variable_names_the_repository(place: str) -> None:
    host = container.host({"REMORA_MODEL_REPOSITORY": place})
    assert host.engine.paths == (place,)


def test_the_first_mounted_folder_is_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = tmp_path / "mnt"
    mounted.mkdir()
    monkeypatch.setattr(container, "MODEL_DIRECTORIES", (str(tmp_path / "absent"), str(mounted), str(tmp_path)))
    assert container.host({}).engine.paths == (str(mounted),)


def test_without_any_flag_it_says_which_models_it_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REMORA_MODEL_REPOSITORY", raising=False)
    monkeypatch.setattr(container, "MODEL_DIRECTORIES", ())
    assert container.main([]) == 2
    assert "expected a PATH or --model-repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        (lambda models: [f"--model-repository={models}"], lambda tmp_path, _: tmp_path / "absent"),
        (lambda models: [str(models)], lambda tmp_path, _: tmp_path / "absent"),
        (lambda _: [], lambda _, models: models),
    ],
    ids=["flag", "path", "variable"],
)
def test_tritons_flags_start_it_and_a_given_repository_takes_the_place_of_the_variables(
    given: Any, variable: Any, digits: Any, child_environment: dict[str, str], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "remora_adapters.container", *given(digits.models)]
    command += [f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false", "--http-address=127.0.0.1"]
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        environment = child_environment | {"REMORA_MODEL_REPOSITORY": str(variable(tmp_path, digits.models))}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_ready(process, port, log)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/digits/ready", timeout=60) as answer:
            assert answer.status == 200
    finally:
        assert end(process) == 0


@pytest.mark.parametrize(("flag", "variable"), [("--require-gpu", ""), ("", "true")], ids=["flag", "variable"])
def test_a_machine_without_the_required_gpu_is_not_ready_and_says_why(
    flag: str, variable: str, digits: Any, child_environment: dict[str, str], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "remora_adapters.container", str(digits.models), *([flag] if flag else [])]
    command += [f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false", "--http-address=127.0.0.1"]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "REMORA_REQUIRE_GPU": variable}
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=child_environment | hidden)
    try:
        wait_until_ready(process, port, log, "/startupz")
        for path, body in (("/readyz?verbose", "--require-gpu: no NVIDIA GPU can be used"), ("/v2/health/ready", "")):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60)
            assert refused.value.code in (400, 503)
            assert body in refused.value.read().decode()
        eventually(lambda: "not ready: --require-gpu: no NVIDIA GPU can be used" in log.read_text(), process=process)
    finally:
        assert end(process) == 0


def test_the_mount_may_hold_a_file_with_functions(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import remora\n\n@remora.model(isolation='thread')\ndef scale(x: float) -> float:\n    return 2 * x\n"
    )
    with Engine(options=container.host({"REMORA_MODEL_REPOSITORY": str(tmp_path)}).engine) as engine:
        assert engine.infer("scale", {"x": [2.0]})["output"].tolist() == [4.0]
