"""Releases in the terms of platforms: shares, copies, and what a platform refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from infra import manifests
from remora.cli import main
from remora.models.release_sources import parse_release
from remora.traffic.releases import Arm, Release
from remora_deploy.deploy.plan import Call
from remora_deploy.manifests import find_renderer
from remora_deploy.manifests.facts import Choices, Facts, Model
from support.servers.hosting import write_scale

SCHEMAS = Path(os.environ.get("CRD_SCHEMAS", ROOT.parent / "shared" / "schemas"))
CANARY = "stable=2,canary=3:10%"
SHADOW = "stable=2,shadow=4:20%"
ARMS = "stable=2,canary=3:10%,b=5:30%"


def render(platform: str, release: str | Release, **choices: Any) -> str:
    scheme = "gs" if platform == "vertex" else "s3"
    found = Choices(release=parse_release(release) if isinstance(release, str) else release, **choices)
    facts = Facts(
        "digits", "registry.example/remora:1", f"{scheme}://bucket/{{version}}/", (Model("m", 8, 2, False),), 0.5, 120
    )
    return find_renderer(platform)(facts._replace(choices=found))


def documents(platform: str, release: str | Release) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render(platform, release)))


def test_sagemaker_has_a_variant_for_each_version_that_answers() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    from deploy_clouds.aws import problems

    *models, config, endpoint = documents("sagemaker", ARMS)
    shares = {each["VariantName"]: each["InitialVariantWeight"] for each in config["ProductionVariants"]}
    assert shares == {"AllTraffic": 0.6, "Canary": 0.1, "b": 0.3}
    assert [each["ModelName"] for each in models] == [
        config["ProductionVariants"][number]["ModelName"] for number in (0, 1, 2)
    ]
    places = [each["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["S3Uri"] for each in models]
    assert places == ["s3://bucket/2/", "s3://bucket/3/", "s3://bucket/5/"]
    assert (endpoint["EndpointName"], endpoint["EndpointConfigName"]) == ("digits", config["EndpointConfigName"])
    assert endpoint["RetainAllVariantProperties"], "the instances that run stay"
    excluded = [each["VariantPropertyType"] for each in endpoint["ExcludeRetainedVariantProperties"]]
    assert excluded == ["DesiredWeight", "DataCaptureConfig"], "and the weights are those of the release"
    calls = [*(("create_model", each) for each in models), ("create_endpoint_config", config)]
    assert [problems(Call("sagemaker", name, each)) for name, each in (*calls, ("update_endpoint", endpoint))] == [
        ""
    ] * 5


def test_sagemaker_copies_requests_to_a_shadow_variant() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    from deploy_clouds.aws import problems

    *models, config, _ = documents("sagemaker", SHADOW)
    (stable,), (shadow,) = config["ProductionVariants"], config["ShadowProductionVariants"]
    assert (shadow["VariantName"], shadow["InitialVariantWeight"]) == ("Shadow", 0.2)
    assert [stable["ModelName"], shadow["ModelName"]] == [each["ModelName"] for each in models]
    assert problems(Call("sagemaker", "create_endpoint_config", config)) == ""
    with pytest.raises(ValueError, match="only beside one production variant"):
        documents("sagemaker", f"{CANARY},shadow=4:20%")


def test_an_azure_endpoint_has_the_shares_of_its_deployments() -> None:
    endpoint, *deployments = documents("azureml", ARMS)
    assert endpoint["traffic"] == {"version-2": 60, "version-3": 10, "version-5": 30}
    assert "mirror_traffic" not in endpoint
    assert {each["name"] for each in deployments} == set(endpoint["traffic"])
    assert [each["model"] for each in deployments] == [f"azureml:digits:{number}" for number in (2, 3, 5)]
    endpoint, *deployments = documents("azureml", SHADOW)
    assert (endpoint["traffic"], endpoint["mirror_traffic"]) == ({"version-2": 100}, {"version-4": 20})
    assert [each["name"] for each in deployments] == ["version-2", "version-4"]


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("stable=2,shadow=4:60%", "expected 0 to 50 percent"),
        (f"{CANARY},shadow=4:20%", "exclude each other"),
        ("stable=2,canary=3:0.5%", "canary has 0.5 %: this platform takes whole percentages"),
        ("stable=2,shadow=4:0.5%", "the shadow has 0.5 %: this platform takes whole percentages"),
        ("stable=2,shadow=4:20.5%", "the shadow has 20.5 %: this platform takes whole percentages"),
    ],
)
def test_azure_refuses_what_an_endpoint_cannot_have(release: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        documents("azureml", release)


def test_kserve_gives_the_canary_its_percentage_and_its_models() -> None:
    predictor = documents("kserve", CANARY)[2]
    spec = predictor["spec"]["predictor"]
    assert (spec["canaryTrafficPercent"], spec["model"]["storageUri"]) == (10, "s3://bucket/3/")
    assert not list(manifests.broken_rules([predictor]))
    with pytest.raises(ValueError, match="KServe divides traffic between two versions"):
        documents("kserve", ARMS)
    with pytest.raises(ValueError, match="neither scale to zero nor canaries"):
        render("kserve", CANARY, mode="standard")


@pytest.mark.parametrize("platform", ["knative", "cloud-run"])
def test_revisions_share_all_traffic_under_the_tags_of_their_aliases(platform: str) -> None:
    (service,) = documents(platform, ARMS)
    assert service["spec"]["traffic"] == [
        {"revisionName": "digits-v2", "percent": 60, "tag": "stable"},
        {"revisionName": "digits-v3", "percent": 10, "tag": "canary"},
        {"revisionName": "digits-v5", "percent": 30, "tag": "b"},
    ]
    assert service["spec"]["template"]["metadata"]["name"] == "digits-v3"
    (container,) = manifests.containers(service)
    assert container["env"] == [{"name": "REMORA_MODEL_REPOSITORY", "value": "s3://bucket/3/"}]


def test_stored_arms_of_one_version_share_a_revision() -> None:
    (service,) = documents("knative", Release(2, (Arm("canary", 3, 1000), Arm("b", 3, 3000))))
    assert [(each["revisionName"], each["percent"]) for each in service["spec"]["traffic"]] == [
        ("digits-v2", 60),
        ("digits-v3", 40),
    ]


@pytest.mark.parametrize("platform", ["knative", "kserve"])
def test_the_clusters_schemas_take_a_release(platform: str) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed here: make test-infra")
    if not SCHEMAS.exists():
        pytest.skip(f"no CRDs of Knative and KServe in {SCHEMAS}: CRD_SCHEMAS names a folder of them")
    crds = manifests.crd_schemas(SCHEMAS)
    assert [problem for each in documents(platform, CANARY) for problem in manifests.misfits(each, crds)] == []


def test_vertex_splits_the_traffic_of_the_deployed_models() -> None:
    upload, deployed = documents("vertex", ARMS)
    assert deployed["--traffic-split"] == "DEPLOYED_V2=60,0=10,DEPLOYED_V5=30"
    assert upload["--model-id"] == deployed["--model"] == "digits-v3"
    assert upload["--artifact-uri"] == "gs://bucket/3/"


def test_an_alias_of_lambda_routes_a_share_to_the_other_version() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    from deploy_clouds.aws import problems

    (alias,) = documents("lambda", "stable=2,canary=3:2.5%")
    assert problems(Call("lambda", "update_alias", alias)) == ""
    assert (alias["Name"], alias["FunctionVersion"]) == ("live", "LAMBDA_VERSION_OF_2")
    assert alias["RoutingConfig"] == {"AdditionalVersionWeights": {"LAMBDA_VERSION_OF_3": 0.025}}
    with pytest.raises(ValueError, match="Lambda divides traffic between two versions"):
        documents("lambda", ARMS)


@pytest.mark.parametrize("platform", ["knative", "kserve", "cloud-run", "vertex", "lambda"])
def test_a_platform_without_copies_names_the_shadow_that_it_leaves_out(platform: str) -> None:
    text = render(platform, f"{CANARY},shadow=4:20%")
    assert "# The shadow, version 4, is left out: this platform does not copy requests." in text
    assert "# The platform chooses the version of each request at random" in text


@pytest.mark.parametrize(
    ("platform", "flags", "reason"),
    [
        ("compose", ["--release", CANARY], "--release has no place in the files of compose"),
        ("knative", ["--release", CANARY], "expected {version} in the location"),
        ("knative", ["--release", CANARY, "--canary", "10"], "--canary and --release exclude each other"),
        ("knative", ["--release"], "expected one running release in"),
        ("knative", ["--release", "stable=2,canary=3:110%"], "expected 0 to 100 percent"),
    ],
)
def test_a_release_that_cannot_be_described_is_refused(
    platform: str, flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scale(tmp_path / "scale")
    assert main(["manifests", platform, str(tmp_path), "--models", "s3://bucket/models", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_describes_the_release_that_the_repository_declares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scale(tmp_path / "scale")
    (tmp_path / "scale" / "release.yaml").write_text("stable: 1\naliases: {old: 1}\n")
    flags = ["--name", "digits", "--models", "s3://bucket/{version}/"]
    assert main(["manifests", "knative", str(tmp_path), *flags, "--release"]) == 2
    assert "running: none" in capsys.readouterr().err
    declared = tmp_path / "release.yaml"
    declared.write_text("stable: 1\ncanary: 2\nweight: 25%\n")
    assert main(["manifests", "knative", str(tmp_path), *flags, "--release", str(declared)]) == 0
    (service,) = yaml.safe_load_all(capsys.readouterr().out)
    assert [each["percent"] for each in service["spec"]["traffic"]] == [75, 25]
