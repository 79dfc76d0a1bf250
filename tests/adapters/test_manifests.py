"""Deployment files: numbers follow from the model, schemas take them, and the files say why."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from hosting import write_scale
from infra import manifests
from remora.cli import main
from remora_adapters.manifests import PLATFORMS, find_renderer, sagemaker
from remora_adapters.manifests.facts import Facts, Model, measure
from remora_adapters.sagemaker.deploying import ApiCall, calls_of, scaling_of

SCHEMAS = Path(os.environ.get("CRD_SCHEMAS", ROOT.parent / "shared" / "schemas"))
FACTS = Facts("digits", "registry.example/remora:1", "s3://bucket/models", (Model("m", 8, 2, False),), 0.5, 120)

facts = st.builds(
    Facts,
    st.just("digits"),
    st.just("registry.example/remora:1"),
    st.just("s3://bucket/models"),
    st.lists(
        st.builds(Model, st.sampled_from(["a", "b"]), st.integers(0, 128), st.integers(1, 4), st.booleans()), min_size=1
    ).map(tuple),
    st.floats(0.01, 900),
    st.integers(10, 60_000),
)


def documents(platform: str, found: Facts) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(find_renderer(platform)(found)))


@given(facts)
def test_a_knative_service_admits_two_batches_and_waits_for_a_slow_load(found: Facts) -> None:
    (service,) = documents("knative", found)
    spec = service["spec"]["template"]["spec"]
    annotations = service["spec"]["template"]["metadata"]["annotations"]
    wanted = 2 * max(max(model.max_batch_size, 1) * model.instances for model in found.models)
    assert spec["containerConcurrency"] >= min(wanted, 1000)
    assert int(annotations["serving.knative.dev/progress-deadline"].rstrip("s")) > found.load_s
    assert not list(manifests.broken_rules([service]))


@given(facts)
def test_a_predictor_and_its_runtimes_keep_kserves_rules(found: Facts) -> None:
    cluster, own, predictor = documents("kserve", found)
    assert [each["kind"] for each in (cluster, own, predictor)] == [
        "ClusterServingRuntime",
        "ServingRuntime",
        "InferenceService",
    ]
    assert cluster["spec"] == own["spec"]
    assert not list(manifests.broken_rules([cluster, predictor]))
    assert predictor["spec"]["predictor"]["scaleTarget"] <= predictor["spec"]["predictor"]["containerConcurrency"]


@given(facts)
def test_an_azure_deployment_has_two_routes_and_room_for_batches(found: Facts) -> None:
    (deployment,) = documents("azureml", found)
    routes = deployment["environment"]["inference_config"]
    assert routes["liveness_route"] != routes["readiness_route"]
    probe = deployment["readiness_probe"]
    assert probe["failure_threshold"] * probe["period"] >= found.load_s
    assert deployment["request_settings"]["max_concurrent_requests_per_instance"] == found.concurrency
    assert 5000 < deployment["request_settings"]["request_timeout_ms"] <= 180_000


@pytest.mark.parametrize("name", ["ab", "1st", "a" * 33])
def test_a_name_that_azure_would_refuse_is_refused_here(name: str) -> None:
    with pytest.raises(ValueError, match=r"3 to 32 letters"):
        documents("azureml", FACTS._replace(name=name))


def test_no_pod_is_to_admit_more_than_knative_lets_it() -> None:
    found = FACTS._replace(models=(Model("m", 4096, 4, False),))
    (service,) = documents("knative", found)
    assert service["spec"]["template"]["spec"]["containerConcurrency"] == 1000
    predictor = documents("kserve", found)[2]["spec"]["predictor"]
    assert (predictor["containerConcurrency"], predictor["scaleTarget"]) == (1000, 700)


@pytest.mark.parametrize("platform", ["knative", "kserve"])
@pytest.mark.parametrize("gpu", [False, True])
def test_the_clusters_schemas_take_what_is_written(platform: str, gpu: bool) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed here: make test-infra")
    if not SCHEMAS.exists():
        pytest.skip(f"no CRDs of Knative and KServe in {SCHEMAS}: CRD_SCHEMAS names a folder of them")
    crds = manifests.crd_schemas(SCHEMAS)
    found = FACTS._replace(models=(Model("m", 8, 2, gpu),))
    assert [list(manifests.misfits(each, crds)) for each in documents(platform, found)] in ([[]], [[], [], []])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_file_says_why_its_numbers_are_what_they_are(platform: str) -> None:
    text = find_renderer(platform)(FACTS)
    assert "Two batches of 8 for each of 2 instances" in text


@given(facts.map(lambda found: found._replace(models=found.models[:1])))
def test_a_sagemaker_endpoint_is_what_the_deploy_command_would_make_and_the_service_model_takes(found: Facts) -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    plan = sagemaker.plan_of(found)
    calls = [*calls_of(plan, exists=False), *scaling_of(plan)]
    written = documents("sagemaker", found)
    assert written == [call.arguments for call in calls]
    assert [problems(call) for call in calls] == [""] * 5
    (variant,) = written[1]["ProductionVariants"]
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] >= min(found.load_s, 3600)
    assert written[4]["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] <= found.concurrency


@cache
def shapes(service: str) -> Any:
    """AWS's own description of a service; no client and no credentials are needed for it."""
    return import_module("botocore.session").get_session().get_service_model(service)


def problems(call: ApiCall) -> str:
    """What AWS's service model has against a call."""
    operation = "".join(word.title() for word in call.operation.split("_"))
    shape = shapes(call.service).operation_model(operation).input_shape
    validator = import_module("botocore.validate").ParamValidator()
    return str(validator.validate(call.arguments, shape).generate_report())


def test_what_the_service_model_does_not_know_is_a_problem() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    assert "ModelData" in problems(ApiCall("sagemaker", "create_model", {"ModelName": "a", "ModelData": "b"}))


def test_a_gpu_and_more_memory_take_a_larger_instance() -> None:
    assert sagemaker.plan_of(FACTS).instance == "ml.c6i.xlarge"
    assert sagemaker.plan_of(FACTS._replace(memory_mib=9_000)).instance == "ml.c6i.4xlarge"
    gpu = FACTS._replace(models=(Model("m", 8, 2, True),))
    assert (sagemaker.plan_of(gpu).instance, "CUDA 13" in sagemaker.render(gpu)) == ("ml.g5.xlarge", True)


def test_a_sagemaker_endpoint_takes_models_from_s3_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_scale(tmp_path / "scale")
    assert main(["manifests", "sagemaker", str(tmp_path), "--name", "digits"]) == 2
    assert "the model must be in S3" in capsys.readouterr().err


def test_facts_are_measured_from_the_models(tmp_path: Path) -> None:
    write_scale(tmp_path / "scale", config="max_batch_size: 8 dynamic_batching { } instance_group { count: 3 }")
    found = measure([str(tmp_path)], "digits", "remora:cpu", "/models")
    assert found.models == (Model("scale", 8, 3, False),)
    assert found.concurrency == 48
    assert found.load_s > 0


def test_the_command_prints_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_scale(tmp_path / "scale")
    command = [
        "manifests",
        "knative",
        str(tmp_path),
        "--name",
        "digits",
        "--image",
        "r/remora:1",
        "--models",
        "s3://b/m",
    ]
    assert main(command) == 0
    (service,) = yaml.safe_load_all(capsys.readouterr().out)
    assert service["metadata"]["name"] == "digits"
    container = service["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["env"][0]["value"]) == ("r/remora:1", "s3://b/m")


@pytest.mark.parametrize(("flag", "value"), [("--name", "Not A Name"), ("--name", "a\nb: c"), ("--image", 'x"\ny')])
def test_words_that_would_break_the_file_are_refused(
    tmp_path: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scale(tmp_path / "scale")
    assert main(["manifests", "knative", str(tmp_path), flag, value]) == 2
    assert flag in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifests", "knative", str(tmp_path / "none"), "--models", "s3://bucket/models"]) == 1
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["knative", "kserve"])
def test_a_path_of_this_machine_is_not_written_into_a_pod(
    platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifests", platform, str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"a pod cannot read '{tmp_path}' of this machine: pass --models" in shown.err
