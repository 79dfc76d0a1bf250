"""`remora image build`: the engines' commands, the context, and what is refused before anything is built."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from remora.cli import main
from remora_deploy.images import DOCKER_MANIFEST, IMAGES
from remora_deploy.images.building import Build, build_command, convert_command, described, push_command

BUILD = Build(IMAGES["sagemaker-cuda12"], "r/remora:1", "amd64", "/context", {"EXTRAS": "gpu", "CUDA": "12"})
# Answers as the engines print them, with the fields that are read.
INSPECTED = {
    "docker": [
        {
            "Architecture": "amd64",
            "Config": {"Labels": {"remora.platform": "container", "remora.cuda": "none"}},
            "Descriptor": {"mediaType": DOCKER_MANIFEST},
        }
    ],
    "podman": [
        {
            "Architecture": "amd64",
            "ManifestType": DOCKER_MANIFEST,
            "Config": {"Labels": {"remora.platform": "container", "remora.cuda": "none"}},
        }
    ],
    "buildah": {
        "Manifest": json.dumps({"schemaVersion": 2, "mediaType": DOCKER_MANIFEST}),
        "Docker": {
            "architecture": "amd64",
            "config": {"Labels": {"remora.platform": "container", "remora.cuda": "none"}},
        },
    },
}


def test_docker_makes_no_index_no_attestations_and_docker_media_types() -> None:
    command = build_command("docker", BUILD)
    assert command[:3] == ["docker", "buildx", "build"]
    assert {"--platform=linux/amd64", "--provenance=false", "--sbom=false"} <= set(command)
    output = dict(pair.split("=") for pair in command[command.index("--output") + 1].split(","))
    assert output == {
        "type": "image",
        "name": "r/remora:1",
        "oci-mediatypes": "false",
        "rewrite-timestamp": "true",
    }
    assert "--build-arg=SOURCE_DATE_EPOCH=0" in command


@pytest.mark.parametrize("engine", ["podman", "buildah"])
def test_other_engines_build_at_a_fixed_time_and_convert_to_docker_media_types(engine: str) -> None:
    command = build_command(engine, BUILD)
    assert command[:2] == [engine, "build"]
    assert {"--platform=linux/amd64", "--format=oci", "--timestamp=0"} <= set(command)
    converted = convert_command(engine, "r.example/remora:1")
    assert converted == [engine, "push", "--format=v2s2", "r.example/remora:1", "containers-storage:r.example/remora:1"]
    assert convert_command(engine, "remora:cpu")[-1] == "containers-storage:localhost/remora:cpu"
    assert convert_command("docker", "remora:cpu") == []
    assert push_command(engine, "r/remora:1") == [engine, "push", "--format=v2s2", "r/remora:1"]


@pytest.mark.parametrize("engine", INSPECTED)
def test_what_an_engine_built_is_read_from_its_description(engine: str) -> None:
    media, architecture, labels = described(engine, json.dumps(INSPECTED[engine]))
    assert (media, architecture) == (DOCKER_MANIFEST, "amd64")
    assert labels == {"remora.platform": "container", "remora.cuda": "none"}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A file in place of the wheel, which no test here installs."""
    made = tmp_path / "remora-9.8.7-py3-none-any.whl"
    made.write_bytes(b"wheel")
    return made


def test_the_context_holds_what_the_image_needs_alone(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "numpy-2.0-cp312-none-any.whl").write_bytes(b"")
    (wheels / "remora-0.0.1-py3-none-any.whl").write_bytes(b"older")
    flags = [
        "--wheel",
        str(wheel),
        "--wheels",
        str(wheels),
        "--context",
        str(tmp_path / "context"),
        "--engine",
        "podman",
    ]
    assert main(["image", "build", "azureml-cuda13", *flags]) == 0
    dist = {path.name for path in (tmp_path / "context" / "dist").iterdir()}
    assert dist == {"numpy-2.0-cp312-none-any.whl", wheel.name}
    context = tmp_path / "context"
    written = {path.relative_to(context).as_posix() for path in context.rglob("*") if path.is_file()}
    image = {f"containers/{each}" for each in ("install.sh", "azureml/Dockerfile", "requirements/cuda13.txt")}
    assert written - {f"dist/{each}" for each in dist} == {"constraints.txt", *image}
    assert os.access(tmp_path / "context" / "containers" / "install.sh", os.X_OK)
    printed = capsys.readouterr().out
    for pair in ("CUDA=13", "DEVICES=all", "EXTRAS=gpu,azureml,otel", "OFFLINE=1", "VERSION=9.8.7"):
        assert f"--build-arg={pair} " in printed


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["cuda12", "--arch", "arm64"], "no wheel with CUDA for arm64"),
        (["cpu", "--tag", "--privileged"], "expected one argument"),
        (["cpu", "--tag=-v"], "expected a name such as REGISTRY/remora:cpu"),
        (["cpu", "--tag=a,push=true"], "expected a name such as REGISTRY/remora:cpu"),
        (["cpu", "--extra=torch;sh"], "expected the name of an extra"),
        (["cpu", "--build-arg=VERSION"], "expected NAME=VALUE"),
        (["gpu"], "invalid choice: 'gpu'"),
    ],
)
def test_what_cannot_be_built_is_refused(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["image", "build", *flags])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert reason in capsys.readouterr().err


ENGINE = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
    inspect) cat {description} ;;
    {failing}) echo "no space left" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program called buildah that logs its arguments and describes a scripted image."""

    def make(description: dict[str, Any], failing: str = "none") -> Path:
        (tmp_path / "bin").mkdir()
        log, text = tmp_path / "calls.txt", tmp_path / "description.json"
        text.write_text(json.dumps(description))
        program = tmp_path / "bin" / "buildah"
        program.write_text(ENGINE.format(log=log, description=text, failing=failing))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        return log

    return make


def test_a_build_is_compared_with_the_request_and_pushed(
    engine: Any, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = engine(INSPECTED["buildah"])
    assert (
        main(["image", "build", "cpu", "--engine", "buildah", "--wheel", str(wheel), "--tag", "r/a:1", "--push"]) == 0
    )
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["build", "push", "inspect", "push"]
    assert capsys.readouterr().out == "r/a:1: linux/amd64, platform container, CUDA none\n"


def test_a_build_for_another_architecture_is_not_pushed(
    engine: Any, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base image of another architecture is used with a warning by every engine."""
    log = engine(INSPECTED["buildah"])
    flags = ["--engine", "buildah", "--wheel", str(wheel), "--push", "--arch", "arm64"]
    assert main(["image", "build", "cpu", *flags]) == 1
    assert "remora:cpu was built, but it is built for amd64, not for arm64" in capsys.readouterr().err
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["build", "push", "inspect"]


@pytest.mark.parametrize("failing", ["build", "push"])
def test_an_engine_that_fails_fails_the_command(
    failing: str, engine: Any, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine(INSPECTED["buildah"], failing)
    assert main(["image", "build", "cpu", "--engine", "buildah", "--wheel", str(wheel), "--push"]) == 1
    assert f"failed: buildah {failing}" in capsys.readouterr().err


def test_without_an_engine_the_message_names_them(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["image", "build", "cpu", "--wheel", str(wheel)]) == 2
    assert "docker or podman or buildah is not on PATH: install it, or use --context DIR" in capsys.readouterr().err
