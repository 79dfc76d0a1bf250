"""Deployment files: numbers follow from the model, schemas take them, and the files say why."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from infra import manifests
from remora.cli import main
from remora_deploy.deploy.plan import Call
from remora_deploy.deploy.sagemaker_calls import calls_of, scaling_of
from remora_deploy.manifests import PLATFORMS, find_renderer, sagemaker
from remora_deploy.manifests.facts import Choices, Facts, Model, measure
from support.servers.hosting import write_scale

SCHEMAS = Path(os.environ.get("CRD_SCHEMAS", ROOT.parent / "shared" / "schemas"))
# libyaml's, because reading takes most of these tests' time.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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
    st.just(Choices()),
)


@cache
def clusters_schemas() -> Any:
    """The CRDs, read once because they are large."""
    return manifests.crd_schemas(SCHEMAS)


def documents(platform: str, found: Facts) -> list[dict[str, Any]]:
    return list(yaml.load_all(find_renderer(platform)(found), Loader=LOADER))


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
    crds = clusters_schemas()
    found = FACTS._replace(models=(Model("m", 8, 2, gpu),))
    assert [list(manifests.misfits(each, crds)) for each in documents(platform, found)] in ([[]], [[], [], []])


POD_PLATFORMS = ["knative", "kserve", "kubernetes"]
SOURCES = {"vertex": "gs://bucket/models"}
CHOICES = {
    "knative": Choices(
        gpus=2, gpu_resource="nvidia.com/mig-1g.10gb", secret="keys", spot="gke", canary=10, monitoring=True
    ),
    "kserve": Choices(
        gpus=1, namespace="ml", service_account="reader", spot="aks", canary=25, least=1, monitoring=True
    ),
    "kubernetes": Choices(gpus=1, spot="eks", monitoring=True, prometheus="http://prometheus:9090", most=9, least=2),
}


def chosen(platform: str, choices: Choices) -> Facts:
    return FACTS._replace(location=SOURCES.get(platform, FACTS.location), choices=choices)


@pytest.mark.parametrize("choices", [None, Choices(), Choices(gpus=1)], ids=["all", "none", "gpu"])
@pytest.mark.parametrize("platform", POD_PLATFORMS)
def test_the_schemas_and_rules_take_what_is_chosen(platform: str, choices: Choices | None) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed here: make test-infra")
    if not SCHEMAS.exists():
        pytest.skip(f"no CRDs of Knative and KServe in {SCHEMAS}: CRD_SCHEMAS names a folder of them")
    rows = documents(platform, chosen(platform, CHOICES[platform] if choices is None else choices))
    crds = clusters_schemas()
    assert [text for each in rows for text in manifests.misfits(each, crds)] == []
    assert list(manifests.broken_rules(rows)) == []


@pytest.mark.parametrize("tasks", [1, 3])
def test_the_schema_and_rules_of_kubernetes_take_a_job(tasks: int) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed here: make test-infra")
    names = tuple(f"s3://bucket/{name}{'-{task}' * (tasks > 1)}.csv" for name in ("in", "out"))
    (found,) = documents("kubernetes", chosen("kubernetes", Choices(gpus=1, spot="aks", job=names, tasks=tasks)))
    assert list(manifests.misfits(found, {})) == []
    assert list(manifests.broken_rules([found])) == []


def limits_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What the containers of the first object with containers may use."""
    (container,) = next(found for each in rows if (found := manifests.containers(each)))
    return dict(container["resources"]["limits"])


def test_a_mig_profile_is_asked_for_by_its_name() -> None:
    rows = documents("kubernetes", chosen("kubernetes", Choices(gpus=2, gpu_resource="nvidia.com/mig-1g.10gb")))
    assert limits_of(rows)["nvidia.com/mig-1g.10gb"] == "2"
    assert "nvidia.com/gpu" not in limits_of(rows)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_file_for_a_gpu_requires_that_it_is_used(platform: str) -> None:
    found = chosen(platform, Choices(gpus=1))
    if platform == "lambda":
        with pytest.raises(ValueError, match="Lambda has no GPUs"):
            find_renderer(platform)(found)
        return
    if platform == "helm":  # whose chart sets the flag
        assert documents(platform, found)[0]["gpu"]["count"] == 1
        return
    text = find_renderer(platform)(found)
    assert "--require-gpu" in text or "REMORA_REQUIRE_GPU" in text
    assert "REQUIRE_GPU" not in find_renderer(platform)(chosen(platform, Choices())).upper().replace("-", "_")


@pytest.mark.parametrize(("cluster", "label"), [("eks", "SPOT"), ("gke", "true"), ("aks", "spot")])
def test_pods_on_spot_nodes_select_and_tolerate_them(cluster: str, label: str) -> None:
    for platform in ("knative", "kubernetes"):
        pod = manifests.pod_of(documents(platform, chosen(platform, Choices(spot=cluster)))[0])
        assert [*pod["nodeSelector"].values()] == [label]
        assert bool(pod.get("tolerations")) == (cluster == "aks")


def test_credentials_of_the_storage_reach_the_pods() -> None:
    for platform in ("knative", "kubernetes"):
        pod = manifests.pod_of(
            documents(platform, chosen(platform, Choices(secret="keys", service_account="reader")))[0]
        )
        assert pod["serviceAccountName"] == "reader"
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    predictor = documents("kserve", chosen("kserve", Choices(service_account="reader")))[2]["spec"]["predictor"]
    assert predictor["serviceAccountName"] == "reader"
    with pytest.raises(ValueError, match="KServe's storage initializer reads the secrets of the service account"):
        documents("kserve", chosen("kserve", Choices(secret="keys")))


def test_a_predictor_takes_an_image_as_its_models() -> None:
    found = FACTS._replace(location="oci://registry.example/digits:1")
    assert documents("kserve", found)[2]["spec"]["predictor"]["model"]["storageUri"] == found.location


def test_standard_mode_of_kserve_keeps_to_what_it_has() -> None:
    cluster, _, predictor = documents("kserve", chosen("kserve", Choices(mode="standard")))
    assert predictor["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "Standard"
    assert "containerConcurrency" not in predictor["spec"]["predictor"]
    assert predictor["spec"]["predictor"]["minReplicas"] == 1
    # Kubernetes' grace of 30 s applies here, that of Knative's revisions (300 s) there.
    assert "--exit-timeout-secs=20" in cluster["spec"]["containers"][0]["args"]
    assert "--exit-timeout-secs=290" in documents("kserve", FACTS)[0]["spec"]["containers"][0]["args"]
    with pytest.raises(ValueError, match="neither scale to zero nor canaries"):
        documents("kserve", chosen("kserve", Choices(mode="standard", canary=10)))


@pytest.mark.parametrize("platform", ["knative", "cloud-run"])
def test_a_canary_and_the_revision_that_serves_share_all_traffic(platform: str) -> None:
    (service,) = documents(platform, chosen(platform, Choices(canary=10, port_name="h2c")))
    first, second = service["spec"]["traffic"]
    assert (first["latestRevision"], first["percent"], second["percent"]) == (True, 10, 90)
    assert manifests.containers(service)[0]["ports"] == [{"name": "h2c", "containerPort": 8080}]
    assert "traffic" not in documents(platform, chosen(platform, Choices()))[0]["spec"]


def test_the_policy_of_the_network_lets_traces_and_credentials_out() -> None:
    policy = next(each for each in documents("kubernetes", FACTS) if each["kind"] == "NetworkPolicy")
    out = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert {53, 443, 4317, 4318, 80, 988} == out


def test_alerts_name_only_metrics_that_the_server_exports() -> None:
    rows = documents("kubernetes", chosen("kubernetes", Choices(monitoring=True)))
    (rule,) = (each for each in rows if each["kind"] == "PrometheusRule")
    text = str(rule["spec"])
    named = set(re.findall(r"(?:nv|remora)_[a-z_]+", text))
    known = (ROOT / "docs" / "monitoring.md").read_text()
    assert named == {
        "nv_inference_request_failure",
        "nv_inference_request_success",
        "remora_request_duration_seconds_bucket",
        "nv_inference_pending_request_count",
    }
    assert all(f"`{name.removesuffix('_bucket')}`" in known for name in named)


@pytest.mark.parametrize(
    ("platform", "mode", "label"),
    [
        ("knative", "knative", "serving.knative.dev/service"),
        ("kserve", "knative", "serving.kserve.io/inferenceservice"),
        ("kserve", "standard", "serving.kserve.io/inferenceservice"),
    ],
)
def test_pods_of_the_serverless_platforms_are_scraped_at_the_port_of_requests(
    platform: str, mode: str, label: str
) -> None:
    rows = documents(platform, chosen(platform, Choices(monitoring=True, mode=mode)))
    monitor, rule = rows[-2:]
    assert (monitor["kind"], rule["kind"]) == ("PodMonitor", "PrometheusRule")
    assert monitor["spec"]["selector"]["matchLabels"] == {label: "digits"}
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "user-port"
    (port,) = manifests.containers(rows[0])[0].get("ports", [{}])
    assert port.get("name") == ("user-port" if mode == "standard" else "http1" if platform == "knative" else None)
    assert "PodMonitor" not in find_renderer(platform)(chosen(platform, Choices(mode=mode)))


def test_a_compose_file_takes_a_folder_or_a_bucket() -> None:
    here = documents("compose", FACTS._replace(location="/srv/models"))[0]["services"]["remora"]
    assert here["volumes"] == ["/srv/models:/models:ro"]
    assert "--model-repository=/models" in here["command"]
    there = documents("compose", chosen("compose", Choices(gpus=1)))[0]["services"]["remora"]
    assert "volumes" not in there
    assert there["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_deployment_its_comment_and_the_chart_have_one_time_limit_of_a_start(gpus: int) -> None:
    found = FACTS._replace(models=(Model("m", 8, 2, gpus > 0),), choices=Choices(gpus=gpus))
    container = documents("kubernetes", found)[0]["spec"]["template"]["spec"]["containers"][0]
    start_s = container["startupProbe"]["failureThreshold"]
    assert f"{start_s} s until" in find_renderer("kubernetes")(found)
    assert documents("helm", found)[0]["startupSeconds"] == start_s


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_chart_takes_its_values(gpus: int) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed here: make test-infra")
    chart = ROOT / "infra" / "helm" / "remora"
    schema = json.loads((chart / "values.schema.json").read_text())
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    choices = Choices(gpus=gpus, secret="keys", service_account="reader", spot="aks", prometheus="http://p:9090")
    (found,) = documents("helm", chosen("helm", choices)._replace(image="registry.example/remora:cuda13"))
    merged = {key: ({**defaults[key], **value} if isinstance(value, dict) else value) for key, value in found.items()}
    jsonschema.validate({**defaults, **merged}, schema)
    assert merged["image"]["repository"] == "registry.example/remora"


def test_a_function_is_what_lambdas_service_model_takes() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    from deploy_clouds.aws import problems

    (found,) = documents("lambda", FACTS._replace(memory_mib=3000))
    assert problems(Call("lambda", "create_function", found)) == ""
    assert found["MemorySize"] == 6144
    assert found["Environment"]["Variables"] == {"REMORA_MODEL_REPOSITORY": "s3://bucket/models"}
    with pytest.raises(ValueError, match="a function has at most 10240"):
        documents("lambda", FACTS._replace(memory_mib=9000))


def test_vertex_uploads_and_deploys_one_model_from_googles_storage() -> None:
    upload, deploy = documents("vertex", chosen("vertex", Choices(gpus=1, canary=20)))
    assert upload["--model-id"] == deploy["--model"]
    assert deploy["--accelerator"] == "type=nvidia-l4,count=1"
    assert deploy["--traffic-split"] == "0=20,DEPLOYED=80"
    with pytest.raises(ValueError, match="reads models from gs:// only"):
        documents("vertex", FACTS)


@pytest.mark.parametrize(
    ("platform", "flags", "reason"),
    [
        ("lambda", ["--canary", "10"], "--canary has no place in the files of lambda"),
        ("compose", ["--spot", "eks"], "--spot has no place in the files of compose"),
        ("knative", ["--keda", "http://p"], "--keda has no place in the files of knative"),
        ("knative", ["--min-replicas", "5", "--max-replicas", "2"], "--min-replicas 5 is more than --max-replicas 2"),
        ("knative", ["--canary", "101"], "--canary 101: expected a percentage"),
        ("kubernetes", ["--min-replicas", "0"], "without a pod no request is counted"),
        ("knative", ["--gpus", "-1"], "--gpus -1: expected 0 to 64"),
        ("knative", ["--secret", "a b"], "--secret 'a b': expected"),
        ("cloud-run", ["--gpus", "2"], "an instance of Cloud Run has one GPU"),
    ],
)
def test_choices_that_a_platform_cannot_have_are_refused(
    platform: str, flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scale(tmp_path / "scale")
    assert main(["manifests", platform, str(tmp_path), "--models", "gs://bucket/models", *flags]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("groups", "gpus", "expected"),
    [
        ("instance_group { kind: KIND_GPU }", 1, (1, True)),
        ("instance_group { kind: KIND_GPU count: 2 gpus: [0] }", 1, (2, True)),
        ("instance_group { kind: KIND_GPU count: 2 }", 2, (4, True)),
        ("", 1, (1, True)),
        ("instance_group { kind: KIND_CPU count: 3 }", 1, (3, False)),
    ],
)
def test_a_machine_without_a_gpu_describes_a_service_with_one(
    groups: str, gpus: int, expected: tuple[int, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_scale(tmp_path / "scale", config=f"max_batch_size: 8 {groups}")
    found = measure([str(tmp_path)], "digits", "remora:cuda13", "/models", Choices(gpus=gpus))
    assert found.models == (Model("scale", 8, *expected),)
    assert found.gpus == gpus


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_file_says_why_its_numbers_are_what_they_are(platform: str) -> None:
    text = find_renderer(platform)(chosen(platform, Choices()))
    assert "Two batches of 8 for each of 2 instances" in text


@given(facts.map(lambda found: found._replace(models=found.models[:1])))
def test_a_sagemaker_endpoint_is_what_the_deploy_command_would_make_and_the_service_model_takes(found: Facts) -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    from deploy_clouds.aws import problems

    plan = sagemaker.plan_of(found)
    calls = [*calls_of(plan), *scaling_of(plan)]
    written = documents("sagemaker", found)
    assert written == [call.arguments for call in calls]
    assert [problems(call) for call in calls] == [""] * 5
    (variant,) = written[1]["ProductionVariants"]
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] >= min(found.load_s, 3600)
    assert written[4]["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] <= found.concurrency


def test_what_the_service_model_does_not_know_is_a_problem() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[deploy-sagemaker]'")
    from deploy_clouds.aws import problems

    assert "ModelData" in problems(Call("sagemaker", "create_model", {"ModelName": "a", "ModelData": "b"}))


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


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
