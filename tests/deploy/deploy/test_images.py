"""Images before a deployment: what a registry says, and what each kind of platform refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy_clouds.registry import DOCKER, OCI, OCI_INDEX, Registry, running
from remora_deploy.deploy.images import Needs, docker_login, inspect, parse_image, pinned, problem_of
from remora_deploy.deploy.plan import CallError

GOOD: dict[str, Any] = {"media_type": DOCKER, "architectures": ["amd64"], "labels": {}}


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running(Registry()) as found:
        yield found


def anonymous(host: str) -> None:
    return None


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("remora", ("registry-1.docker.io", "library/remora", "latest")),
        ("me/remora:cpu", ("registry-1.docker.io", "me/remora", "cpu")),
        ("localhost:5000/remora", ("localhost:5000", "remora", "latest")),
        ("r.example/a/b:1", ("r.example", "a/b", "1")),
        ("r.example/a@sha256:0", ("r.example", "a", "sha256:0")),
        ("r.example/a:1@sha256:0", ("r.example", "a", "sha256:0")),
    ],
)
def test_a_reference_is_read_by_dockers_rules(image: str, parts: tuple[str, str, str]) -> None:
    assert parse_image(image) == parts


@pytest.mark.parametrize("image", ["", "UPPER/case", "r.example/../x", "r.example/a@md5:0", "-x"])
def test_a_reference_that_is_none_is_refused(image: str) -> None:
    with pytest.raises(ValueError, match="expected an image"):
        parse_image(image)


@pytest.mark.parametrize("image", ["r:5000/a:1", "r:5000/a", f"r:5000/a@sha256:{'0' * 64}", "r:5000/a:1@sha256:0"])
def test_a_reference_is_pinned_to_a_digest(image: str) -> None:
    assert pinned(image, {"image": {"digest": "sha256:1"}}) == "r:5000/a@sha256:1"


def test_an_image_is_described_by_its_registry(registry: Registry) -> None:
    digest = registry.add("remora:1", labels={"remora.cuda": "12.9"})
    found = inspect(f"{registry.address}/remora:1", "amd64", anonymous)
    assert found == {
        "digest": digest,
        "media_type": DOCKER,
        "architectures": ["amd64"],
        "labels": {"remora.cuda": "12.9"},
    }


def test_of_an_index_the_image_of_the_machines_is_described(registry: Registry) -> None:
    registry.add("remora:1", OCI_INDEX, ("arm64", "amd64"), {"remora.platform": "any"})
    found = inspect(f"{registry.address}/remora:1", "amd64", anonymous)
    assert (found["media_type"], sorted(found["architectures"])) == (OCI_INDEX, ["amd64", "arm64"])
    assert found["labels"] == {"remora.platform": "any"}
    only = inspect(f"{registry.address}/remora:1", "riscv64", anonymous)
    assert "it is for arm64, amd64" in problem_of(only, Needs(architecture="riscv64"))


def test_a_login_gets_a_token_and_goes_nowhere_else(registry: Registry, tmp_path: Path) -> None:
    registry.add("remora:1")
    registry.login = ("user", "s3cret")
    with pytest.raises(CallError, match="403") as refused:
        inspect(f"{registry.address}/remora:1", "amd64", anonymous)
    assert refused.value.kind == "denied"
    config = tmp_path / "config.json"
    encoded = base64.b64encode(b"user:s3cret").decode()
    config.write_text(json.dumps({"auths": {registry.address: {"auth": encoded}}}))
    registry.asked.clear()
    assert inspect(f"{registry.address}/remora:1", "amd64", docker_login(config))["architectures"] == ["amd64"]
    basic = [path for path, authorization in registry.asked if authorization.startswith("Basic")]
    assert [path.partition("?")[0] for path in basic] == ["/token"]
    assert docker_login(config)("other.example") is None


def test_a_missing_image_and_an_unreachable_registry_differ(registry: Registry) -> None:
    with pytest.raises(CallError) as missing:
        inspect(f"{registry.address}/remora:2", "amd64", anonymous)
    with pytest.raises(CallError) as gone:
        inspect("127.0.0.1:9/remora:1", "amd64", anonymous)
    assert (missing.value.kind, gone.value.kind) == ("missing", "unreachable")


@pytest.mark.parametrize(
    ("facts", "needs", "text"),
    [
        ({}, Needs(), ""),
        ({"media_type": OCI}, Needs(docker_only=True), "only Docker's media types"),
        ({"media_type": OCI}, Needs(single=True), ""),
        ({"media_type": OCI_INDEX}, Needs(single=True), "it is an index"),
        ({"architectures": ["arm64"]}, Needs(), "it is for arm64"),
        ({"labels": {"remora.platform": "azureml"}}, Needs("sagemaker"), "built for azureml, not for sagemaker"),
        ({"labels": {"remora.platform": "any"}}, Needs("sagemaker"), ""),
        ({"labels": {"remora.cuda": ""}}, Needs(gpu=True), "has no CUDA"),
        ({"labels": {"remora.cuda": "none"}}, Needs(gpu=True), "has no CUDA"),
        ({"labels": {"remora.cuda": ""}}, Needs(), ""),
        ({"labels": {"remora.cuda": "13.0"}}, Needs(gpu=True, cuda=12), "needs CUDA 13, and the platform's driver"),
        ({"labels": {"remora.cuda": "12.9"}}, Needs(gpu=True, cuda=13), ""),
        ({"labels": {"remora.cuda": "13"}}, Needs(gpu=True), ""),
        ({}, Needs(gpu=True, cuda=12), ""),
    ],
)
def test_what_a_platform_cannot_run_is_a_problem(facts: dict[str, Any], needs: Needs, text: str) -> None:
    problem = problem_of({**GOOD, **facts}, needs)
    assert text in problem
    assert bool(problem) == bool(text)
