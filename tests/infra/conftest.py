"""Terraform's providers: the real one for AWS where a mirror of it is on disk, stubs with schemas for the others."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra import provider_schemas
from infra.terraform import INFRA, MODULES, ROOT, Prepared, Verdict, mirrored, providers

STUBBED = {"google": "hashicorp/google", "azurerm": "hashicorp/azurerm", "azapi": "azure/azapi"}
STUB_PYTHON = ROOT / ".venv-stub" / "bin" / "python"
WHEELS = ROOT / ".venv-stub" / "wheels"


@pytest.fixture(scope="session")
def tool() -> str:
    """Terraform. It takes minutes with providers of this size, so the plain test run leaves it out."""
    if not os.environ.get("TEST_INFRA"):
        pytest.skip("Terraform runs under make test-infra")
    found = shutil.which("terraform")
    if found is None:
        pytest.skip("terraform is not installed")
    return found


@pytest.fixture(scope="session")
def mirror() -> Path:
    """A folder that holds the aws provider as a file system mirror does."""
    named = os.environ.get("TF_PROVIDER_MIRROR")
    places = [Path(named)] if named else [path.parents[2] for path in Path("/opt").glob("*/*/hashicorp/aws")]
    if not places:
        pytest.skip("no mirror of the aws provider on this machine: TF_PROVIDER_MIRROR names one")
    return places[0]


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What TF_REATTACH_PROVIDERS says: running stubs with the schemas of what the modules use."""
    wheels = {path.name.split("_provider_")[1].split("-")[0]: path for path in WHEELS.glob("cdktf_*.whl")}
    if not STUB_PYTHON.exists() or not {"google", "azurerm"} <= set(wheels):
        pytest.skip("the stub providers are made by make test-infra")
    wanted = provider_schemas.wanted_by(INFRA)
    place = tmp_path_factory.mktemp("schemas")
    attached: dict[str, object] = {}
    with ExitStack() as stack:
        for name, address in STUBBED.items():
            known = provider_schemas.AZAPI if name == "azapi" else provider_schemas.of_wheel(wheels[name], name, wanted)
            file = place / f"{name}.json"
            file.write_text(json.dumps(known))
            command = [str(STUB_PYTHON), str(Path(__file__).with_name("stub_provider.py")), str(file), address]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
            attached |= json.loads(process.stdout.readline())
        yield json.dumps(attached)


@pytest.fixture(scope="session")
def prepare(
    tool: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Prepared]:
    """Makes an initialised copy of a module by its name."""

    def initialised(module: str) -> Prepared:
        place = tmp_path_factory.mktemp("prepared")
        folder = place / "module"
        shutil.copytree(MODULES[module], folder, ignore=shutil.ignore_patterns(".terraform*"))
        real = providers(module) == {"aws"}
        environment = mirrored(request.getfixturevalue("mirror") if real else None, place / "rc")
        if not real:
            environment["TF_REATTACH_PROVIDERS"] = request.getfixturevalue("stubs")
        prepared = Prepared(folder, environment)
        done = prepared.run("init", "-input=false", "-no-color", "-backend=false")
        assert done.returncode == 0, done.stdout + done.stderr
        return prepared

    return initialised


@pytest.fixture(scope="session")
def tested(prepare: Callable[[str], Prepared]) -> Callable[[str], Verdict]:
    """Runs a module's own tests by its name, once: several tests read what came of them, and it takes half a minute."""

    @functools.cache
    def ran(module: str) -> Verdict:
        prepared = prepare(module)
        return Verdict(prepared, prepared.run("test", "-json", "-verbose"))

    return ran


@pytest.fixture
def prepared(module: str, prepare: Callable[[str], Prepared]) -> Prepared:
    return prepare(module)
