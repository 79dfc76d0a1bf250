"""SageMaker: the calls of a plan against AWS's own service model, and the changes of an endpoint on a stand-in."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")

from conftest import ROOT
from deploy_clouds.aws import FakeAws, problems
from deploy_clouds.journeys import Deployments, changing
from remora_deploy.deploy.command import parse
from remora_deploy.deploy.plan import CallError, find
from remora_deploy.deploy.sagemaker_calls import (
    Plan,
    Rollout,
    calls_of,
    config_call,
    endpoint_call,
    model_call,
    scaling_of,
)

PLAN = Plan(
    "digits",
    "123456789012.dkr.ecr.eu-west-1.amazonaws.com/remora@sha256:" + "0" * 64,
    "s3://bucket/models/digits",
    "arn:aws:iam::123456789012:role/endpoint",
)
PLANS = {
    "plain": PLAN,
    "archive": replace(PLAN, model="s3://bucket/digits.tar.gz"),
    "gpu": replace(PLAN, instance="ml.g5.xlarge", environ=(("SAGEMAKER_TRITON_ALLOW_METRICS", "true"),)),
    "scaled": replace(PLAN, most=4),
    "many": replace(PLAN, multi_model=True),
    "async": replace(PLAN, answers="s3://bucket/answers/", least=0, most=2),
    "serverless": replace(PLAN, serverless=(2048, 20), model="s3://bucket/digits.tar.gz"),
    "canary": replace(PLAN, rollout=Rollout("canary", 10, 60, ("errors",))),
    "linear": replace(PLAN, rollout=Rollout("linear", 50, 60, ("errors",))),
    "rolling": replace(PLAN, rollout=Rollout("rolling", 50, 60, ("errors",))),
    "captured": replace(PLAN, capture="s3://bucket/captured/", capture_share=20),
    "alarmed": replace(PLAN, rollout=Rollout(alarms=("errors",))),
}
CURRENT = [{"VariantName": "AllTraffic", "ModelName": "digits-old", "InstanceType": "ml.c6i.xlarge"}]
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/remora:1"


def variants(plan: Plan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = config_call(plan).arguments["ProductionVariants"]
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_call_is_one_that_the_service_model_takes(plan: Plan) -> None:
    plan.check()
    update = endpoint_call(plan, "config", exists=True, instances=2)
    for call in (*calls_of(plan), update, *scaling_of(plan)):
        if "AlarmActions" in call.arguments:
            call = call._replace(arguments={**call.arguments, "AlarmActions": ["arn"]})
        assert not problems(call), call
    assert len(plan.model_name) <= 63


def test_a_folder_is_not_packed_and_an_archive_is() -> None:
    folder, archive = (model_call(PLANS[kind]).arguments for kind in ("plain", "archive"))
    source = folder["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
    assert source == {"S3Uri": "s3://bucket/models/digits/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    assert archive["PrimaryContainer"]["ModelDataUrl"] == "s3://bucket/digits.tar.gz"
    assert "ModelDataSource" not in archive["PrimaryContainer"], "batch transform does not take it"


def test_a_serverless_endpoint_gets_an_archive_and_never_the_source_that_it_does_not_support(tmp_path: Path) -> None:
    """ContainerDefinition: "you cannot use ModelDataSource in conjunction with ... SageMaker serverless endpoints"."""
    container = model_call(PLANS["serverless"]).arguments["PrimaryContainer"]
    assert (container["ModelDataUrl"], "ModelDataSource" in container) == ("s3://bucket/digits.tar.gz", False)
    with pytest.raises(ValueError, match="takes one archive"):
        replace(PLAN, serverless=(2048, 20)).check()
    (tmp_path / "model.onnx").write_bytes(b"weights")
    words = ["sagemaker", "digits", "--image", IMAGE, "--model", str(tmp_path), "--bucket", "s3://bucket/models"]
    module, _, options = parse([*words, "--region", "eu-west-1", "--serverless", "2048:20"])
    platform: Any = module.build(options, None)
    assert re.fullmatch(r"s3://bucket/models/digits/[0-9a-f]{16}/model\.tar\.gz", platform.wanted.plan.model)
    assert platform.wanted.source.folder == str(tmp_path)


def test_a_gpu_that_is_not_used_is_not_served_by_the_processors() -> None:
    environment = {kind: model_call(PLANS[kind]).arguments["PrimaryContainer"]["Environment"] for kind in PLANS}
    assert [kind for kind, found in environment.items() if "REMORA_REQUIRE_GPU" in found] == ["gpu"]


def test_a_gpu_gets_the_image_whose_driver_the_runtimes_need() -> None:
    (variant,) = variants(PLANS["gpu"])
    assert variant["InferenceAmiVersion"].endswith("gpu-4-1")
    assert "InferenceAmiVersion" not in variants(PLAN)[0]


def test_families_with_gpus_are_those_of_the_terraform_module() -> None:
    declared = (ROOT / "infra" / "aws-sagemaker" / "variables.tf").read_text()
    (listed,) = re.findall(r'variable "gpu_families".*?default\s+= \[(.*?)\]', declared, re.DOTALL)
    families = re.findall(r'"([\w-]+)"', listed)
    assert {"g5", "gr6", "g7e", "p6-b200"} <= set(families)
    assert all(replace(PLAN, instance=f"ml.{family}.xlarge").gpu for family in families)
    assert not any(replace(PLAN, instance=f"ml.{family}.xlarge").gpu for family in ("c6i", "m5d", "inf2", "trn1"))


def test_scaling_is_no_part_of_the_names_and_the_model_is() -> None:
    names = {config_call(replace(PLAN, most=most, target=target)).arguments["EndpointConfigName"]
             for most, target in ((1, 8.0), (4, 8.0), (4, 2.0))}  # fmt: skip
    assert len(names) == 1
    assert PLAN.model_name != replace(PLAN, model="s3://bucket/models/other").model_name
    assert PLAN.model_name != replace(PLAN, image=PLAN.image.replace("0", "1")).model_name


def test_a_share_of_the_traffic_goes_to_a_variant_beside_the_current_one() -> None:
    stable, canary = config_call(replace(PLAN, traffic=10), CURRENT).arguments["ProductionVariants"]
    assert (stable["ModelName"], stable["InitialVariantWeight"]) == ("digits-old", 0.9)
    assert (canary["ModelName"], canary["InitialVariantWeight"]) == (PLAN.model_name, 0.1)


def test_a_shadow_gets_copies_and_the_current_variant_answers() -> None:
    call = config_call(replace(PLAN, shadow=50), CURRENT)
    assert not problems(call)
    assert [each["ModelName"] for each in call.arguments["ProductionVariants"]] == ["digits-old"]
    (shadow,) = call.arguments["ShadowProductionVariants"]
    assert (shadow["ModelName"], shadow["InitialVariantWeight"]) == (PLAN.model_name, 0.5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "two words"}, "a name has"),
        ({"name": "a" * 53}, "a name has"),
        ({"model": "/models"}, "must be in S3"),
        ({"startup_s": 10}, "60 to 3600"),
        ({"target": 0.0}, "expected a positive"),
        ({"target": float("nan")}, "expected a positive"),
        ({"least": 0}, "only an asynchronous endpoint"),
        ({"least": 3}, "the maximum must be at least"),
        ({"serverless": (1000, 5), "model": "s3://bucket/digits.tar.gz"}, "1024, 2048"),
        ({"serverless": (1024, 5), "most": 2}, "scales by itself"),
        ({"answers": "/tmp"}, "expected an S3 location"),
        ({"multi_model": True, "instance": "ml.g5.xlarge"}, "only Triton's container"),
        ({"capture": "/tmp"}, "expected an S3 location"),
        ({"capture": "s3://b/c", "serverless": (1024, 5)}, "synchronous endpoint"),
        ({"capture_share": 0}, "1 to 100 percent"),
        ({"traffic": 0}, "1 to 100 percent"),
        ({"shadow": 101}, "0 to 100 percent"),
        ({"shadow": 10, "traffic": 10}, "exclude each other"),
        ({"traffic": 10, "serverless": (1024, 5)}, "synchronous endpoint"),
        ({"rollout": Rollout("blue")}, "expected one of"),
        ({"rollout": Rollout("canary", 60)}, "5 to 50 percent"),
        ({"rollout": Rollout("linear", 5)}, "steps of 10 to 50 percent"),
        ({"rollout": Rollout("rolling", 25), "traffic": 10}, "pass them without guardrails"),
        ({"rollout": Rollout(alarms=("errors",)), "shadow": 10}, "pass them without guardrails"),
        ({"rollout": Rollout("canary", 10, 9999)}, "0 to 3600 seconds"),
    ],
)
def test_a_value_that_the_platform_refuses_is_an_error_before_any_call(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(PLAN, **change).check()


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", IMAGE, "--model", f"s3://bucket/models/{version}/"]

    return Deployments("sagemaker", FakeAws(), flags, ["--region", "eu-west-1"])


def test_an_endpoint_that_failed_before_is_named_with_its_reason_and_replaced_on_request(stage: Deployments) -> None:
    aws: Any = stage.cloud
    aws.endpoint = {"EndpointStatus": "Failed", "EndpointConfigName": "x", "FailureReason": "did not pass the ping"}
    assert not stage.deploy("v1")
    assert "did not pass the ping" in stage.text()
    assert "--replace" in stage.text()
    assert stage.deploy("v1", "--replace"), stage.text()
    assert aws.serving() == {"v1": 100}


def test_another_instance_type_takes_scaling_away_first_and_sets_it_up_again(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--max-instances", "4"), stage.text()
    assert stage.deploy("v1", "--max-instances", "4", "--instance-type", "ml.c6i.2xlarge"), stage.text()
    operations = [call.operation for call in aws.calls]
    assert operations.index("deregister_scalable_target") < operations.index("update_endpoint")
    assert aws.target["MaxCapacity"] == 4
    assert aws.policies


def test_scaling_comes_back_when_the_update_to_another_instance_type_is_rolled_back(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--max-instances", "4"), stage.text()
    before = aws.policies
    aws.fault = "rollback"
    assert not stage.deploy("v1", "--max-instances", "4", "--instance-type", "ml.c6i.2xlarge")
    assert (aws.target["MaxCapacity"], aws.policies) == (4, before)


def test_scaling_is_kept_until_a_fixed_number_is_requested(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--max-instances", "4"), stage.text()
    before = (aws.target, aws.policies)
    assert stage.deploy("v2"), stage.text()
    assert (aws.target, aws.policies) == before
    assert stage.deploy("v2", "--instances", "1"), stage.text()
    assert (aws.target, aws.policies) == (None, {})


@pytest.mark.parametrize("trial", [("--traffic", "10"), ("--shadow", "10")])
def test_a_trial_leaves_the_fleet_and_the_scaling_of_what_serves(stage: Deployments, trial: tuple[str, str]) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--max-instances", "4"), stage.text()
    aws.scale(4)
    before = (aws.target, aws.policies)
    assert stage.deploy("v2", *trial, "--max-instances", "4", "--instance-type", "ml.c6i.2xlarge"), stage.text()
    stable = serving_config(aws)["ProductionVariants"][0]
    assert stable["InitialInstanceCount"] == 4
    assert (aws.counts()["v1"], aws.target, aws.policies) == (4, *before)
    assert stage.rollback("v1"), stage.text()
    assert (aws.counts(), aws.target, aws.policies) == ({"v1": 4}, *before)


def test_a_canary_of_one_instance_is_refused_before_the_update(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert not stage.deploy("v2", "--rollout", "canary")
    assert "there is one instance" in stage.text()
    aws.scale(2)
    assert stage.deploy("v2", "--rollout", "canary"), stage.text()


def test_a_share_is_promoted_without_guardrails_which_exclude_several_variants(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--instances", "2"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    aws.calls.clear()
    assert stage.deploy("v2", "--rollout", "rolling"), stage.text()
    (update,) = [call for call in aws.calls if call.operation == "update_endpoint"]
    assert "DeploymentConfig" not in update.arguments


def test_a_quota_that_is_not_listed_is_not_checked(stage: Deployments) -> None:
    assert stage.deploy("v1", "--instance-type", "ml.c6i.2xlarge"), stage.text()
    assert "quota of ml.c6i.2xlarge for endpoint usage: not checked" in stage.text()


def test_an_undo_returns_to_the_count_that_ran(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--max-instances", "4"), stage.text()
    aws.scale(4)
    aws.fault = "model broken"
    assert not stage.deploy("v2", "--instances", "1")
    assert (aws.serving(), aws.counts()) == ({"v1": 100}, {"v1": 4})


def test_an_update_that_cannot_scale_serves_and_ends_with_an_error(stage: Deployments) -> None:
    aws: Any = stage.cloud

    def refused(**_: Any) -> Any:
        raise CallError("denied", "not authorized to perform: iam:CreateServiceLinkedRole")

    aws.application_autoscaling_register_scalable_target = refused
    assert not stage.deploy("v1", "--max-instances", "4")
    assert aws.serving() == {"v1": 100}
    assert "not done" in stage.text()
    assert "iam:CreateServiceLinkedRole" in stage.text()


def test_other_limits_of_scaling_do_not_move_the_fleet(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1", "--max-instances", "4"), stage.text()
    aws.calls.clear()
    assert stage.deploy("v1", "--max-instances", "6"), stage.text()
    assert not any("endpoint " in each or "model" in each for each in changing(aws.calls, {"invoke_endpoint": ()}))
    assert aws.target["MaxCapacity"] == 6


def test_another_number_of_instances_changes_only_the_number(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    aws.calls.clear()
    assert stage.deploy("v1", "--instances", "2"), stage.text()
    changes = changing(aws.calls, {"invoke_endpoint": ()})
    assert changes == ["sagemaker update_endpoint_weights_and_capacities"]
    assert aws.endpoint["ProductionVariants"][0]["DesiredInstanceCount"] == 2


def test_an_asynchronous_endpoint_without_instances_is_woken_by_an_alarm(stage: Deployments) -> None:
    aws: Any = stage.cloud
    flags = ("--async", "s3://bucket/answers/", "--instances", "0", "--max-instances", "2")
    assert stage.deploy("v1", *flags), stage.text()
    assert aws.alarms == {"digits-wake"}
    assert stage.undeploy()
    assert (aws.alarms, aws.roles) == (set(), {})


def test_old_configurations_are_deleted_beyond_the_ones_to_keep(stage: Deployments) -> None:
    aws: Any = stage.cloud
    for version in ("v1", "v2", "v3", "v4", "v5"):
        assert stage.deploy(version, "--keep", "2"), stage.text()
    assert len(aws.configs) == 3
    assert stage.rollback(), stage.text()
    assert aws.serving() == {"v4": 100}


@pytest.mark.parametrize("keep", ["-1", "6"])
def test_more_earlier_versions_than_a_rollback_knows_are_refused_and_not_deleted(stage: Deployments, keep: str) -> None:
    with pytest.raises(ValueError, match=f"--keep={keep}: expected 0 to 5 earlier versions"):
        stage.build("v1", "--keep", keep)


def test_a_share_of_the_traffic_is_promoted_by_the_same_command_without_it(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert not stage.deploy("v1", "--traffic", "10")
    assert "need an endpoint that serves" in stage.text()
    assert stage.deploy("v1"), stage.text()
    aws.fault = "model broken"
    assert not stage.deploy("v2", "--traffic", "10"), "the golden request goes to the new variant"
    assert [each["VariantName"] for each in serving_config(aws)["ProductionVariants"]] == ["AllTraffic"]
    aws.fault = ""
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert [each["VariantName"] for each in serving_config(aws)["ProductionVariants"]] == ["AllTraffic", "Canary"]
    assert stage.deploy("v2"), stage.text()
    assert aws.serving() == {"v2": 100}


def test_a_shadow_runs_beside_the_version_that_answers(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--shadow", "50"), stage.text()
    assert aws.serving() == {"v1": 100}
    assert len(serving_config(aws)["ShadowProductionVariants"]) == 1


@pytest.mark.parametrize(("release", "variants"), [("stable=1,shadow=2:50%", 1), ("stable=1,canary=2:25%", 2)])
def test_a_release_is_applied_as_a_share_or_a_shadow(stage: Deployments, release: str, variants: int) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--release", release), stage.text()
    config = serving_config(aws)
    shares = [each["InitialVariantWeight"] for each in config["ProductionVariants"]]
    assert shares == ([0.75, 0.25] if variants == 2 else [1.0])
    assert [each["InitialVariantWeight"] for each in config.get("ShadowProductionVariants", [])] == [0.5][
        variants - 1 :
    ]


def serving_config(aws: Any) -> Any:
    return aws.configs[aws.endpoint["EndpointConfigName"]]


def test_the_created_role_reads_only_the_model_and_the_image(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    policy = aws.iam_get_role_policy("remora-digits")["PolicyDocument"]
    read = policy["Statement"][0]
    assert (read["Action"], read["Resource"]) == (["s3:GetObject"], "arn:aws:s3:::bucket/models/v1/*")
    assert policy["Statement"][2]["Resource"] == "arn:aws:ecr:eu-west-1:123456789012:repository/remora"
    assert stage.deploy("v2"), stage.text()
    policy = aws.iam_get_role_policy("remora-digits")["PolicyDocument"]
    read = [each["Resource"] for each in policy["Statement"] if each["Action"] == ["s3:GetObject"]]
    assert read == [f"arn:aws:s3:::bucket/models/{version}/*" for version in ("v2", "v1")], "a rollback reads v1"


def test_a_tag_that_moves_is_rolled_out(stage: Deployments) -> None:
    aws: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    before = aws.endpoint["EndpointConfigName"]
    image, aws.image = aws.image, lambda name: {**image(name), "digest": f"sha256:{'1' * 64}"}
    assert stage.deploy("v1"), stage.text()
    assert aws.endpoint["EndpointConfigName"] != before
    serving = aws.configs[aws.endpoint["EndpointConfigName"]]["ProductionVariants"][0]["ModelName"]
    assert find(aws.models[serving], "PrimaryContainer.Image").endswith("1" * 64)


def test_requests_and_answers_are_captured_where_the_role_may_write(stage: Deployments) -> None:
    aws: Any = stage.cloud
    flags = ("--capture", "s3://other/captured/", "--capture-percent", "20")
    assert stage.deploy("v1", *flags), stage.text()
    captured = aws.configs[aws.endpoint["EndpointConfigName"]]["DataCaptureConfig"]
    assert (captured["DestinationS3Uri"], captured["InitialSamplingPercentage"]) == ("s3://other/captured/", 20)
    assert [each["CaptureMode"] for each in captured["CaptureOptions"]] == ["Input", "Output"]
    statements = aws.iam_get_role_policy("remora-digits")["PolicyDocument"]["Statement"]
    assert {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": "arn:aws:s3:::other/captured/*"} in statements
    assert stage.deploy("v1"), stage.text()
    assert "DataCaptureConfig" not in aws.configs[aws.endpoint["EndpointConfigName"]]
