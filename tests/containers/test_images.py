"""The images, built and run: what is inside, who may read it, how fast it starts, and how it ends."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, free_ports
from containers.conftest import ARCHITECTURE, build_image
from remora_deploy.emulate.lambda_runtime import RuntimeApi
from remora_deploy.images import DOCKER_MANIFEST, IMAGES, problem_of
from remora_deploy.images.building import described

BUDGETS = tomllib.loads((ROOT / "containers" / "budgets.toml").read_text())
NAMES = ("cpu", "sagemaker", "azureml", "lambda")
DOCKER_LAYERS = {f"application/vnd.docker.image.rootfs.diff.tar{end}" for end in ("", ".gzip")}
USERS = {"as-root": 0, "as-10001": 10001}

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_adds_no_more_than_its_budget(name: str, images: Any, figures: list[str]) -> None:
    files = [path.lstat() for path in (images[name].root / "opt" / "remora").rglob("*")]
    megabytes = sum(each.st_size for each in files) / 1e6
    figures.append(f"{name}: {megabytes:.0f} MB beyond the base, of {BUDGETS[name]['megabytes']} MB")
    assert megabytes <= BUDGETS[name]["megabytes"]


@pytest.mark.parametrize("name", NAMES)
def test_an_image_holds_no_installer_and_nothing_of_the_build(name: str, images: Any) -> None:
    assert not list((images[name].root / "opt" / "remora").glob("lib/*/site-packages/pip"))
    assert not (images[name].root / "build").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_module_is_compiled(name: str, images: Any) -> None:
    packages = images[name].root / "opt" / "remora" / "lib"
    bare = [
        path
        for path in packages.rglob("remora*/**/*.py")
        if not list((path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc"))
    ]
    assert not bare


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_installed_may_be_read_by_anyone(name: str, images: Any) -> None:
    paths = [path for path in (images[name].root / "opt" / "remora").rglob("*") if not path.is_symlink()]
    closed = [path for path in paths if ~path.stat().st_mode & (0o005 if path.is_dir() else 0o004)]
    assert not closed


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_has_the_media_types_that_lambda_and_sagemaker_accept(
    name: str, images: Any, buildah: list[str], tmp_path: Path
) -> None:
    """What a registry would get: no index, Docker's types, one architecture."""
    target = tmp_path / name
    subprocess.run([*buildah, "push", f"localhost/remora:{name}", f"dir:{target}"], check=True, capture_output=True)
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["mediaType"] == DOCKER_MANIFEST
    assert {each["mediaType"] for each in manifest["layers"]} <= DOCKER_LAYERS
    config = json.loads((target / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
    assert (config["os"], config["architecture"]) == ("linux", ARCHITECTURE)
    labels = config["config"]["Labels"]
    assert (labels["remora.platform"], labels["remora.cuda"]) == (IMAGES[name].platform, "none")
    assert labels["remora.extras"].split(",") == list(IMAGES[name].extras)
    text = subprocess.run([*buildah, "inspect", "--type=image", f"localhost/remora:{name}"], capture_output=True)
    found = described("buildah", text.stdout.decode())
    assert problem_of(IMAGES[name], ARCHITECTURE, *found) == ""


def test_the_same_files_give_the_same_digest(images: Any, buildah: list[str], context: Path, tmp_path: Path) -> None:
    build_image(buildah, "sagemaker", context, "localhost/remora:again")
    digests = []
    for tag in ("sagemaker", "again"):
        target = tmp_path / tag
        subprocess.run([*buildah, "push", f"localhost/remora:{tag}", f"dir:{target}"], check=True, capture_output=True)
        digests.append(hashlib.sha256((target / "manifest.json").read_bytes()).hexdigest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_bill_of_materials_lies_in_the_image(name: str, images: Any) -> None:
    document = json.loads((images[name].root / "opt" / "remora" / "sbom.cdx.json").read_text())
    names = {each["name"] for each in document["components"]}
    assert {"numpy", "onnxruntime"} <= names
    assert ("awslambdaric" in names) == (name == "lambda")
    licences = (images[name].root / "opt" / "remora" / "licenses.txt").read_text()
    assert all(f"{each['name']} {each['version']}: " in licences for each in document["components"])


@pytest.mark.parametrize("uid", USERS.values(), ids=USERS)
def test_the_cpu_image_serves_on_a_read_only_root_and_ends_on_sigterm(
    uid: int, images: Any, models: Path, digits: Any, figures: list[str]
) -> None:
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    command = [*images["cpu"].config.get("Cmd", ()), *ports]
    with images["cpu"].running(command, uid=uid, mounts={"/mnt/models": models}, environment={}) as container:
        container.answer(f"http://127.0.0.1:{http}/v2/health/ready")
        figures.append(f"cpu, uid {uid}: ready {time.monotonic() - container.started_s:.2f} s after the start")
        body = (digits.requests / "seven.json").read_bytes()
        answer = json.loads(container.answer(f"http://127.0.0.1:{http}/v2/models/digits/infer", body))
        assert answer["model_name"] == "digits"
        assert container.stop() == 0


@pytest.mark.parametrize("uid", USERS.values(), ids=USERS)
def test_the_sagemaker_image_answers_ping_and_invocations(
    uid: int, images: Any, models: Path, digits: Any, figures: list[str]
) -> None:
    (port,) = free_ports(1)
    environment = {"SAGEMAKER_BIND_TO_PORT": str(port)}
    image = images["sagemaker"]
    with image.running(["serve"], uid=uid, mounts={"/opt/ml/model": models}, environment=environment) as container:
        container.answer(f"http://127.0.0.1:{port}/ping")
        figures.append(f"sagemaker, uid {uid}: /ping {time.monotonic() - container.started_s:.2f} s after the start")
        body = (digits.requests / "seven.json").read_bytes()
        assert json.loads(container.answer(f"http://127.0.0.1:{port}/invocations", body))["outputs"]
        assert container.stop() == 0


def test_the_sagemaker_image_passes_for_a_container_of_the_platform(
    images: Any, models: Path, digits: Any, child_environment: dict[str, str], figures: list[str]
) -> None:
    (port,) = free_ports(1)
    environment, mounts = {"SAGEMAKER_BIND_TO_PORT": str(port)}, {"/opt/ml/model": models}
    with images["sagemaker"].running(["serve"], uid=0, mounts=mounts, environment=environment) as container:
        url = f"http://127.0.0.1:{port}"
        container.answer(f"{url}/ping")
        ask = [sys.executable, "-m", "remora", "emulate", "sagemaker", url, "--body", digits.requests / "seven.json"]
        done = subprocess.run(ask, env=child_environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + container.said()
        figures.append(f"sagemaker, remora emulate: {done.stdout.strip().splitlines()[-1]}")


@pytest.mark.parametrize("uid", USERS.values(), ids=USERS)
def test_the_azureml_image_is_alive_ready_and_scores(
    uid: int, images: Any, models: Path, digits: Any, figures: list[str]
) -> None:
    (port,) = free_ports(1)
    environment = {"SERVER_PORT": str(port), "AZUREML_MODEL_DIR": "/models/digits/1"}
    mounts = {"/models/digits/1": models}
    with images["azureml"].running([], uid=uid, mounts=mounts, environment=environment) as container:
        for route in ("/v2/health/live", "/v2/health/ready"):
            container.answer(f"http://127.0.0.1:{port}{route}")
        figures.append(f"azureml, uid {uid}: ready {time.monotonic() - container.started_s:.2f} s after the start")
        body = (digits.requests / "seven.json").read_bytes()
        assert json.loads(container.answer(f"http://127.0.0.1:{port}/score", body))["outputs"]
        assert container.stop() == 0


@pytest.mark.parametrize("adapter", ["knative", "cloud_run"])
def test_the_cpu_image_carries_the_hosts_that_give_one_port(
    adapter: str, images: Any, models: Path, digits: Any
) -> None:
    (port,) = free_ports(1)
    image = images["cpu"]._replace(
        config={**images["cpu"].config, "Entrypoint": ["python", "-m", f"remora_adapters.{adapter}"]}
    )
    mounts, environment = {"/mnt/models": models}, {"PORT": str(port)}
    with image.running([], uid=10001, mounts=mounts, environment=environment) as container:
        container.answer(f"http://127.0.0.1:{port}/v2/health/ready")
        body = (digits.requests / "seven.json").read_bytes()
        assert json.loads(container.answer(f"http://127.0.0.1:{port}/v2/models/digits/infer", body))["outputs"]
        assert container.stop() == 0


def test_the_lambda_image_answers_an_event(images: Any, models: Path, digits: Any, figures: list[str]) -> None:
    event = (digits.requests / "seven.json").read_bytes()
    with RuntimeApi(0) as api:
        environment = {"AWS_LAMBDA_RUNTIME_API": api.address, "AWS_LAMBDA_FUNCTION_NAME": "digits"}
        mounts = {"/opt/models": models}
        invocation = api.send_event(event, timeout_s=60)
        with images["lambda"].running([], uid=10001, mounts=mounts, environment=environment) as container:
            assert invocation.done.wait(60), container.said()
            reply = invocation.reply
            assert reply is not None
            assert not reply.error, f"{reply.shown}\n{container.said()}"
            assert json.loads(reply.body)["model_name"] == "digits"
            figures.append(f"lambda: first event {time.monotonic() - container.started_s:.2f} s after the start")
