"""Mistakes that providers let pass: what every module keeps, by its text; Terraform itself is not needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from infra.terraform import MODULES, ROOT

# What something else changes at run time: Terraform would set it back with every apply.
OWNED_BY_OTHERS = {
    ("knative-gpu/eks", "aws_eks_node_group"): "scaling_config[0].desired_size",
    ("knative-gpu/aks", "azurerm_kubernetes_cluster_node_pool"): "node_count",
    ("knative-gpu/gke", "google_container_node_pool"): "initial_node_count",
    ("azure-ml", "azapi_resource"): "body.sku.capacity",
}
# What cannot be changed while it is used: the new one comes first, and so under another name.
REPLACED_IN_USE = {
    "aws_sagemaker_model": r"\n    model   = \"\$\{var\.name\}-\$\{substr\(sha256\(",
    "aws_cloudformation_stack.configuration": r"configurations = .*\n\s+\"\$\{var\.name\}-\$\{substr\(sha256\(",
}


def text(module: str) -> str:
    return "\n".join(path.read_text() for path in sorted(MODULES[module].glob("*.tf")))


def resources(module: str, kind: str) -> list[str]:
    """The bodies of a module's resources of one kind (or of one, by KIND.NAME), comments left out."""
    kind, _, name = kind.partition(".")
    bare = re.sub(r"^\s*#.*\n", "", text(module), flags=re.MULTILINE)
    found = re.finditer(rf'^resource "{kind}" "(\w+)" \{{\n(.*?)^\}}', bare, re.MULTILINE | re.DOTALL)
    return [match[2] for match in found if name in ("", match[1])]


@pytest.mark.parametrize("module", [name for name in MODULES if "image_uri" in text(name)])
def test_images_are_named_by_digest(module: str) -> None:
    assert r"@sha256:[0-9a-f]{64}$" in text(module)


@pytest.mark.parametrize(("kind", "naming"), REPLACED_IN_USE.items())
def test_what_is_replaced_while_in_use_comes_first_and_under_a_new_name(kind: str, naming: str) -> None:
    (body,) = resources("aws-sagemaker", kind)
    assert "create_before_destroy = true" in body
    assert re.search(r"^  for_each\s+= .*\n  name\s+= each\.key$", body, re.MULTILINE)
    assert re.search(naming, text("aws-sagemaker"))


def test_an_endpoint_that_was_rolled_back_is_not_taken_for_updated() -> None:
    (body,) = resources("aws-sagemaker", "aws_sagemaker_endpoint")
    assert re.search(r"postcondition \{\s+condition\s+= self\.endpoint_config_name == ", body)


@pytest.mark.parametrize(("module", "kind"), OWNED_BY_OTHERS)
def test_counts_that_autoscaling_owns_are_left_alone(module: str, kind: str) -> None:
    owned = re.escape(OWNED_BY_OTHERS[module, kind])
    assert any(re.search(rf"ignore_changes = \[{owned}\]", body) for body in resources(module, kind))


def test_a_deployment_gets_its_traffic_last_and_loses_it_first() -> None:
    """Terraform destroys what is taken out before it changes what depends on it, unless the new comes first."""
    (deployment,) = resources("azure-ml", "azapi_resource.deployment")
    assert "create_before_destroy = true" in deployment
    (traffic,) = resources("azure-ml", "azapi_update_resource.traffic")
    assert "depends_on = [azapi_resource.deployment]" in traffic


def test_scaling_waits_for_the_endpoint() -> None:
    (target,) = resources("aws-sagemaker", "aws_appautoscaling_target")
    assert "aws_sagemaker_endpoint.this.name" in target
    # The policies come after the target for the same reason, and by the same means.
    for policy in resources("aws-sagemaker", "aws_appautoscaling_policy"):
        assert "aws_appautoscaling_target.variant[0].resource_id" in policy


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("knative-gpu/")])
def test_pools_are_tainted_and_go_down_to_nothing(module: str) -> None:
    code = text(module)
    assert re.search(r'nvidia\.com/gpu(=present:NoSchedule"|"\n\s+value  = "present"\n\s+effect = "NO_SCHEDULE")', code)
    assert re.search(r'variable "nodes" \{.*?default\s+= \{ min = 0,', code, re.DOTALL)


def test_only_azures_endpoints_go_through_azapi() -> None:
    """azurerm has no online endpoints; where a provider has a resource its schema is worth more than a free body."""
    users = {name for name in MODULES if '"azure/azapi"' in text(name).lower()}
    assert users == {"azure-ml"}
    assert not re.search(r'resource "azurerm_machine_learning_(online|deployment)', text("azure-ml"))


def test_an_endpoint_answers_at_once_or_through_s3_and_never_both() -> None:
    """An asynchronous configuration makes the whole endpoint so: the mode decides, and refuses the other's."""
    assert re.search(r'\(var\.async != null\) == \(var\.mode == "async"\)', text("aws-sagemaker"))


def test_starts_may_take_as_long_as_large_models_do() -> None:
    """The platforms' own patience, minutes at most, ends the start of a large model: each module sets it."""
    patience = {
        "aws-sagemaker": r"ContainerStartupHealthCheckTimeoutInSeconds\s+= .*var\.startup_timeout_seconds",
        "azure-ml": r"failureThreshold = ceil\(each\.value\.load_seconds / 5\)",
        "cloud-run-gpu": r"failure_threshold = var\.startup_seconds",
    }
    for module, setting in patience.items():
        assert re.search(setting, text(module)), module


def test_nothing_that_terraform_makes_is_kept_with_the_modules() -> None:
    """Locks with one machine's hashes, providers of hundreds of megabytes, states with secrets."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files", "infra"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"no repository here: {listed.stderr.strip()}")
    kept = [Path(line) for line in listed.stdout.splitlines()]
    assert kept
    assert not [path for path in kept if {".terraform", ".terraform.lock.hcl"} & set(path.parts)]
    assert not [path for path in kept if ".tfstate" in path.name or path.name.endswith(".tfvars")]
    assert max((ROOT / path).stat().st_size for path in kept) < 100_000


def test_no_attribute_is_read_that_newer_providers_warn_of() -> None:
    """`aws_region.name` is deprecated in version 6 of the provider; `id` is the same in both."""
    for module in MODULES.values():
        for path in module.glob("*.tf"):
            assert not re.search(r"data\.aws_region\.\w+\.name\b", path.read_text()), path


def test_isolation_is_explained_where_packages_are_installed() -> None:
    isolated = (MODULES["aws-sagemaker"] / "variables.tf").read_text().partition('variable "network_isolation"')[2]
    assert "requirements.txt" in isolated.partition("\n}")[0]
    page = (ROOT / "docs" / "deploy" / "sagemaker.md").read_text()
    paragraph = next(each for each in page.split("\n\n") if "requirements.txt" in each)
    assert "network_isolation = false" in paragraph


# -- the rules that tflint recommends (tflint itself is in no registry that the tests use) -----------------------------

FOLDERS = sorted(
    {path.parent for path in (ROOT / "infra").rglob("*.tf") if ".terraform" not in path.parts},
    key=lambda folder: folder.as_posix(),
)


def blocks(source: str, kind: str) -> dict[str, str]:
    """Return the bodies of the top-level blocks of a kind by their labels, joined by dots."""
    found = re.finditer(rf"^{kind}((?: \"[\w-]+\")*) \{{(.*?)^\}}", source, re.MULTILINE | re.DOTALL)
    return {".".join(re.findall(r"[\w-]+", match[1])): match[2] for match in found}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT / "infra").as_posix())
def test_declarations_are_typed_described_and_used(folder: Path) -> None:
    source = "\n".join(path.read_text() for path in sorted(folder.glob("*.tf")))
    source = re.sub(r"^\s*(#|//).*\n", "", source, flags=re.MULTILINE)
    for name, body in blocks(source, "variable").items():
        assert re.search(r"^  type\s+=", body, re.MULTILINE), f"variable {name} has no type"
        assert re.search(r"^  description\s+=", body, re.MULTILINE), f"variable {name} has no description"
        others = source.replace(body, "")
        assert re.search(rf"\bvar\.{name}\b", others), f"variable {name} is not used"
    for name, body in blocks(source, "output").items():
        assert re.search(r"^  description\s+=", body, re.MULTILINE), f"output {name} has no description"
    for body in re.findall(r"^locals \{(.*?)^\}", source, re.MULTILINE | re.DOTALL):
        for name in re.findall(r"^  (\w+)\s+=", body, re.MULTILINE):
            assert re.search(rf"\blocal\.{name}\b", source), f"local {name} is not used"
    for name in blocks(source, "data"):
        assert f"data.{name}" in source, f"data {name} is not used"
    assert not re.search(r'=\s*"\$\{[^}"]*\}"\s*$', source, re.MULTILINE), "an interpolation alone needs no quotes"
    assert not re.search(r"\w\.\d+\.\w", re.sub(r'"[^"]*"', "", source)), "an index is written in brackets"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT / "infra").as_posix())
def test_versions_of_terraform_and_of_each_provider_are_required(folder: Path) -> None:
    source = "\n".join(path.read_text() for path in sorted(folder.glob("*.tf")))
    assert re.search(r"^\s+required_version\s+=", source, re.MULTILINE)
    required = blocks(source, "terraform")[""]
    kinds = {name.partition("_")[0] for kind in ("resource", "data") for name in blocks(source, kind)}
    for provider in kinds - {"terraform"}:
        stated = re.search(rf"^    {provider} = \{{(.*?)^    \}}", required, re.MULTILINE | re.DOTALL)
        assert stated is not None, f"provider {provider} is not required"
        assert "version" in stated[1], f"provider {provider} has no version"
