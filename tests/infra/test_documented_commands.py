"""The commands of the pages that use infra/: each names a folder that Terraform can apply, and all that it asks for."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from infra.terraform import INFRA, ROOT

PAGES = [ROOT / "docs" / "infrastructure.md", *sorted((ROOT / "docs" / "deploy").glob("*.md"))]
COMMAND = re.compile(r"terraform\s+-chdir=(?P<folder>infra/[\w/-]+)\s+apply(?P<rest>[^`|]*)")
APPLIES = [
    pytest.param(match["folder"], match["rest"], id=f"{page.stem}-{match['folder'].removeprefix('infra/')}")
    for page in PAGES
    for match in COMMAND.finditer(page.read_text())
]


def blocks(folder: Path, kind: str) -> dict[str, str]:
    code = "\n".join(path.read_text() for path in sorted(folder.glob("*.tf")))
    found = re.finditer(rf'^{kind} "(\w+)" \{{\n(.*?)^\}}', code, re.MULTILINE | re.DOTALL)
    return {match[1]: match[2] for match in found}


@pytest.mark.parametrize(("folder", "rest"), APPLIES)
def test_a_documented_apply_gives_every_variable_that_has_no_default(folder: str, rest: str) -> None:
    needed = {name for name, body in blocks(ROOT / folder, "variable").items() if "default" not in body}
    given = set(re.findall(r"-var '?(\w+)=", rest))
    assert needed <= given, f"missing: {needed - given}"
    assert given <= set(blocks(ROOT / folder, "variable"))
    assert "..." not in rest.replace("sha256:...", "").replace("azureml://...", "")


@pytest.mark.parametrize(("folder", "rest"), APPLIES)
def test_a_documented_apply_is_of_a_folder_with_the_providers_it_needs(folder: str, rest: str) -> None:
    """azurerm takes nothing from the environment in place of its block; aws and google do."""
    code = "\n".join(path.read_text() for path in (ROOT / folder).glob("*.tf"))
    if "hashicorp/azurerm" in code:
        provider = blocks(ROOT / folder, "provider")["azurerm"]
        assert "features {}" in provider
        assert "subscription_id" in provider


def test_every_module_has_a_documented_apply() -> None:
    applied = {str(each.values[0]).removeprefix("infra/").partition("/examples")[0] for each in APPLIES}
    modules = {str(path.parent.relative_to(INFRA)) for path in INFRA.rglob("versions.tf")}
    assert applied == modules


CLUSTERS = sorted(INFRA.glob("knative-gpu/*/examples/cluster/main.tf"))


def commands_of(example: Path) -> list[str]:
    """The commands that an example's output `next` prints, with names in place of what Terraform fills in."""
    (body,) = re.findall(
        r"^  value = \[\n(.*?)^  \]", blocks(example.parent, "output")["next"], re.MULTILINE | re.DOTALL
    )
    return [re.sub(r"\$\{[^}]*\}", "filled-in", line) for line in re.findall(r'^    "(.*)",$', body, re.MULTILINE)]


def test_every_cloud_has_an_example_that_makes_a_cluster() -> None:
    assert [path.parts[-4] for path in CLUSTERS] == ["aks", "eks", "gke"]


@pytest.mark.parametrize("example", CLUSTERS, ids=lambda path: path.parts[-4])
def test_a_cluster_example_ends_in_a_request(example: Path) -> None:
    *_, install, chart, forward, request = commands_of(example)
    assert (ROOT / install.split()[-1]).exists()
    assert chart.startswith("helm install remora infra/helm/remora ")
    assert "service/remora 8000" in forward
    assert request.startswith("curl localhost:8000/v2/models/")


@pytest.mark.parametrize("example", CLUSTERS, ids=lambda path: path.parts[-4])
def test_the_chart_takes_what_a_cluster_example_sets(example: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed here: make test-infra")
    chart = ROOT / "infra" / "helm" / "remora"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    (line,) = [each for each in commands_of(example) if each.startswith("helm install")]
    words = shlex.split(line.replace("\\\\", "\\"))
    for at, word in enumerate(words):
        if not word.startswith("--set"):
            continue
        path, _, value = words[at + 1].partition("=")
        *parents, key = re.split(r"(?<!\\)\.", path)
        place = values
        for parent in parents:
            place = place[parent]
        name = key.replace("\\.", ".")
        assert name in place or parents[-1] in ("annotations", "podLabels"), path
        place[name] = value if word == "--set-string" or not value.isdigit() else int(value)
    jsonschema.validate(values, json.loads((chart / "values.schema.json").read_text()))
    # A pod has its labels and its credentials where the cloud looks for them.
    assert values["gpu"]["count"] == 1
    assert values["models"]["uri"].partition("://")[0] in ("s3", "gs", "as")


def test_terraform_is_initialised_before_it_applies() -> None:
    assert "init" in (ROOT / "docs" / "infrastructure.md").read_text().partition("| Platform | Command |")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_upload_nests_the_second_time(page: Path) -> None:
    """`cp --recursive models gs://BUCKET/models` makes models/models where the folder is there already."""
    assert "storage cp --recursive" not in page.read_text()
