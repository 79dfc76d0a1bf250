"""The Terraform modules, by Terraform itself: formatted, valid, planned, tested against the providers' schemas.

The aws modules run with the real provider where a mirror of it lies on disk (TF_PROVIDER_MIRROR names the folder).
google, azurerm and azapi have stubs that hold their schemas, made from the last wheels of their bindings by make
test-infra. Nothing here reaches a cloud.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from infra.terraform import INFRA, MODULES, Prepared, Verdict, terraform

PINNED = {"aws": ">= 5.100, < 7", "google": ">= 6.50, < 8", "azurerm": "~> 4.55", "azapi": "~> 2.4"}

pytestmark = pytest.mark.timeout(600)


def texts(module: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(MODULES[module].glob("*.tf"))}


def declared(module: str, kind: str) -> dict[str, str]:
    """A module's variables or outputs: name and body."""
    found = re.finditer(rf'^{kind} "(\w+)" \{{\n(.*?)^\}}', "\n".join(texts(module).values()), re.MULTILINE | re.DOTALL)
    return {match[1]: match[2] for match in found}


# -- what needs no Terraform ------------------------------------------------------------------------------------------


def test_there_is_a_module_for_each_platform() -> None:
    assert set(MODULES) == {
        "aws-sagemaker",
        "azure-ml",
        "cloud-run-gpu",
        "knative-gpu/aks",
        "knative-gpu/eks",
        "knative-gpu/gke",
        "lambda",
        "vertex",
    }


@pytest.mark.parametrize("module", MODULES)
def test_every_variable_and_output_says_what_it_is(module: str) -> None:
    for kind in ("variable", "output"):
        for name, body in declared(module, kind).items():
            assert re.search(r'^  description = ".{10,}"$', body, re.MULTILINE), f"{module}: {kind} {name}"
    assert all("  type " in body for body in declared(module, "variable").values())


@pytest.mark.parametrize("module", MODULES)
def test_every_validation_names_its_variable_in_its_message(module: str) -> None:
    for name, body in declared(module, "variable").items():
        for message in re.findall(r'error_message = "(.*)"', body):
            assert message.startswith(name), f"{module}: {name}: {message}"


@pytest.mark.parametrize("module", MODULES)
def test_every_variable_that_is_validated_has_a_refusal_among_the_tests(module: str) -> None:
    validated = {name for name, body in declared(module, "variable").items() if "validation {" in body}
    tests = (MODULES[module] / "tests" / "refusals.tftest.hcl").read_text()
    refused = set(re.findall(r"expect_failures = \[var\.(\w+)\]", tests))
    # Names that one rule of the cloud governs are tried where the rule differs.
    spared = {"aws-sagemaker": {"environment", "target_concurrency", "component", "subnet_ids"}}
    spared |= {
        "cloud-run-gpu": {"name", "timeout_seconds"},
        "lambda": {"name", "scratch_mb", "architecture", "kept_warm"},
    }
    assert validated - spared.get(module, set()) == refused


@pytest.mark.parametrize("module", MODULES)
def test_providers_are_those_tested_up_to_the_next_major_version_but_one(module: str) -> None:
    versions = dict(re.findall(r'source  = "\w+/(\w+)"\n\s+version = "(.+)"', texts(module)["versions.tf"]))
    assert versions == {name: PINNED[name] for name in versions}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_an_example_and_a_test_that_plans_it(module: str) -> None:
    examples = {path.parent.name for path in MODULES[module].glob("examples/*/main.tf")}
    tests = "\n".join(path.read_text() for path in MODULES[module].glob("tests/*.tftest.hcl"))
    assert examples
    assert examples == set(re.findall(r'source = "\./examples/([\w-]+)"', tests))


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("knative-gpu/")])
def test_every_platform_has_an_example_with_most_of_what_can_be_set(module: str) -> None:
    example = (MODULES[module] / "examples" / "complete" / "main.tf").read_text()
    given = {name for name in declared(module, "variable") if re.search(rf"^  {name}\s+= ", example, re.MULTILINE)}
    assert len(given) >= len(declared(module, "variable")) / 2


# -- what Terraform says ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tool")
def test_the_files_are_formatted() -> None:
    done = terraform("fmt", "-check", "-recursive", "-diff", folder=INFRA, environment=dict(os.environ))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_valid_and_its_tests_pass(module: str, tested: Callable[[str], Verdict]) -> None:
    done = tested(module).prepared.run("validate", "-no-color")
    assert done.returncode == 0, done.stdout + done.stderr
    said = list(tested(module).events())
    (summary,) = [event["test_summary"] for event in said if event["type"] == "test_summary"]
    problems = [event["diagnostic"] for event in said if event["type"] == "diagnostic"]
    assert (summary["status"], summary["failed"], summary["errored"]) == ("pass", 0, 0), problems
    assert summary["passed"] > 0


@pytest.mark.parametrize("module", ["vertex"])
def test_an_argument_that_does_not_exist_is_refused(module: str, prepared: Prepared) -> None:
    """The stubs are worth something: they know what does not exist."""
    folder, environment = prepared
    file = prepared.folder / "main.tf"
    file.write_text(file.read_text().replace("display_name               = var.name", "displayname = var.name"))
    done = terraform("validate", "-no-color", folder=folder, environment=environment)
    assert done.returncode == 1
    assert "Unsupported argument" in done.stderr + done.stdout
