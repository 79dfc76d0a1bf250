"""Docker Compose: the document, its labels, and copies of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy_clouds.docker import FakeDocker
from deploy_clouds.journeys import Deployments
from remora_deploy.deploy.uploads import upload


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "remora:container", "--model", f"s3://bucket/models/{version}/"]

    return Deployments("compose", FakeDocker(), flags)


def documents(docker: Any) -> list[Any]:
    texts = [call.arguments["input"] for call in docker.calls if call.arguments.get("input")]
    return [json.loads(text)["services"]["remora"] for text in texts]


def test_the_container_has_no_rights_and_its_port_is_on_loopback(stage: Deployments) -> None:
    docker: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    (service,) = documents(docker)
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert (service["cap_drop"], service["read_only"], service["user"]) == (["ALL"], True, "10001:10001")
    assert service["environment"]["REMORA_MODEL_REPOSITORY"] == "s3://bucket/models/v1/"


def test_a_local_folder_is_copied_below_its_digest_and_mounted(stage: Deployments, tmp_path: Path) -> None:
    docker: Any = stage.cloud
    models = tmp_path / "models" / "digits" / "1"
    models.mkdir(parents=True)
    (models / "model.onnx").write_bytes(b"weights")
    stage.flags = lambda version: [
        "--image",
        "remora:1",
        "--model",
        str(tmp_path / "models"),
        "--bucket",
        str(tmp_path),
    ]
    platform: Any = stage.build("v1")
    source = platform.wanted.source
    assert source.location.startswith(str(tmp_path / "digits"))
    assert "copied to" in upload(source.folder, source.location, {})
    assert (Path(source.location) / "digits" / "1" / "model.onnx").read_bytes() == b"weights"
    assert upload(source.folder, source.location, {}) == "already there"
    document = platform._document(platform.wanted)
    assert document["volumes"] == [f"{source.location}:/models:ro"]
    assert document["environment"]["REMORA_MODEL_REPOSITORY"] == "/models"
    assert docker.container is None


def test_a_dollar_is_no_variable_of_compose(stage: Deployments) -> None:
    docker: Any = stage.cloud
    assert stage.deploy("v1", "--env", "A=$HOME"), stage.text()
    (service,) = documents(docker)
    assert service["environment"]["A"] == "$$HOME"


def test_the_labels_retain_the_versions_that_served(stage: Deployments) -> None:
    docker: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2"), stage.text()
    retained = json.loads(docker.container["labels"]["remora.documents"].replace("$$", "$"))
    models = [each["environment"]["REMORA_MODEL_REPOSITORY"] for each in retained.values()]
    assert models == ["s3://bucket/models/v1/", "s3://bucket/models/v2/"]
    assert docker.container["labels"]["remora.served"] == "_".join(retained)
    assert stage.rollback("v1"), stage.text()
    assert not stage.rollback()
    assert "no earlier version" in stage.text()


def test_a_port_that_another_container_uses_is_a_failed_check(stage: Deployments) -> None:
    docker: Any = stage.cloud
    docker.docker_ps = lambda words: "other\n"
    assert not stage.deploy("v1")
    assert "port 8000: other uses it" in stage.text()
    assert "to do: pass another --port" in stage.text()


def test_a_gpu_needs_the_nvidia_runtime(stage: Deployments) -> None:
    assert not stage.deploy("v1", "--gpus", "1")
    assert "nvidia-container-toolkit" in stage.text()


@pytest.mark.parametrize(
    ("flags", "text"),
    [(("--memory", "much"), "expected a size"), (("--port", "0"), "1 to 65535"), (("--model", "absent"), "a folder")],
)
def test_a_wrong_value_is_an_error_before_any_call(stage: Deployments, flags: tuple[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        stage.build("v1", *flags)
