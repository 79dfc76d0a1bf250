"""Deploying: the calls that a plan stands for, held against AWS's own service model, and made on a stubbed client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from remora.cli import main
from remora.system.install_advice import install_command
from remora_adapters.sagemaker.deploying import ApiCall, Plan, calls_of, deploy, plan_of, scaling_of

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")
Stubber = pytest.importorskip("botocore.stub").Stubber

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
    "serverless": replace(PLAN, serverless=(2048, 20)),
}
ARGUMENTS = ["digits", "--image", PLAN.image, "--model", PLAN.model, "--role", PLAN.role]


def clients(service: str) -> Any:
    return boto3.client(service, region_name="eu-west-1", aws_access_key_id="x", aws_secret_access_key="y")


def problems(call: ApiCall) -> str:
    """What AWS's service model has against a call."""
    client = clients(call.service)
    try:
        shape = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[call.operation]).input_shape
        return str(
            __import__("botocore.validate").validate.ParamValidator().validate(call.arguments, shape).generate_report()
        )
    finally:
        client.close()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_call_is_one_that_the_service_model_takes(plan: Plan) -> None:
    plan.check()
    for call in (*calls_of(plan, exists=False), *calls_of(plan, exists=True), *scaling_of(plan)):
        assert not problems(call), call
    assert len(plan.object_name) <= 63


def test_a_folder_is_not_packed_and_an_archive_is() -> None:
    folder, archive = (calls_of(PLANS[kind], exists=False)[0].arguments for kind in ("plain", "archive"))
    source = folder["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
    assert source == {"S3Uri": "s3://bucket/models/digits/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    assert archive["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["CompressionType"] == "Gzip"


def test_a_gpu_gets_the_image_whose_driver_the_runtimes_need() -> None:
    (variant,) = calls_of(PLANS["gpu"], exists=False)[1].arguments["ProductionVariants"]
    assert variant["InferenceAmiVersion"].endswith("gpu-4-1")
    (plain,) = calls_of(PLAN, exists=False)[1].arguments["ProductionVariants"]
    assert "InferenceAmiVersion" not in plain


def test_another_plan_has_other_names_and_the_same_plan_the_same() -> None:
    assert PLAN.object_name == replace(PLAN).object_name
    assert len({plan.object_name for plan in PLANS.values()}) == len(PLANS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "two words"}, "a name has"),
        ({"name": "a" * 53}, "a name has"),
        ({"model": "/models"}, "must be in S3"),
        ({"startup_s": 10}, "60 to 3600"),
        ({"target": 0.0}, "expected a positive"),
        ({"target": float("nan")}, "expected a positive"),
        ({"least": 0}, "only an asynchronous endpoint"),
        ({"least": 3}, "the maximum must be at least"),
        ({"serverless": (1000, 5)}, "1024, 2048"),
        ({"serverless": (1024, 5), "most": 2}, "scales by itself"),
        ({"answers": "/tmp"}, "expected an S3 location"),
        ({"multi_model": True, "instance": "ml.g5.xlarge"}, "only Triton's container"),
    ],
)
def test_what_the_platform_would_refuse_is_refused_here(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PLAN, **change).check()


@pytest.fixture
def sagemaker() -> Iterator[Any]:
    client = clients("sagemaker")
    client.stub = Stubber(client)
    with client.stub:
        yield client
    client.close()


def absent(client: Any, operation: str) -> None:
    client.stub.add_client_error(operation, "ValidationException", "Could not find")


def test_a_first_deployment_makes_all_three_and_waits(sagemaker: Any) -> None:
    model, config, endpoint = calls_of(PLAN, exists=False)
    absent(sagemaker, "describe_endpoint")
    absent(sagemaker, "describe_model")
    sagemaker.stub.add_response("create_model", {"ModelArn": "arn:aws:sagemaker:x:1:model/m"}, model.arguments)
    absent(sagemaker, "describe_endpoint_config")
    arn = {"EndpointConfigArn": "arn:aws:sagemaker:x:1:endpoint-config/c"}
    sagemaker.stub.add_response("create_endpoint_config", arn, config.arguments)
    sagemaker.stub.add_response("create_endpoint", {"EndpointArn": "arn:aws:sagemaker:x:1:e"}, endpoint.arguments)
    sagemaker.stub.add_response("describe_endpoint", described(PLAN))
    lines = list(deploy(PLAN, lambda _: sagemaker))
    sagemaker.stub.assert_no_pending_responses()
    assert lines == [
        f"create_model {PLAN.object_name}",
        f"create_endpoint_config {PLAN.object_name}",
        "create_endpoint digits",
        "digits is in service",
    ]


def described(plan: Plan, status: str = "InService") -> dict[str, Any]:
    return {
        "EndpointName": plan.name,
        "EndpointArn": "arn:aws:sagemaker:eu-west-1:123456789012:endpoint/digits",
        "EndpointConfigName": plan.object_name,
        "EndpointStatus": status,
        "CreationTime": 0,
        "LastModifiedTime": 0,
    }


def test_the_same_plan_again_changes_nothing(sagemaker: Any) -> None:
    sagemaker.stub.add_response("describe_endpoint", described(PLAN))
    sagemaker.stub.add_response(
        "describe_model", {"ModelName": PLAN.object_name, "CreationTime": 0, "ModelArn": "a" * 20}
    )
    config = {"EndpointConfigName": "c", "EndpointConfigArn": "a" * 20, "ProductionVariants": [], "CreationTime": 0}
    config["ProductionVariants"] = [{"VariantName": "v"}]
    sagemaker.stub.add_response("describe_endpoint_config", config)
    assert list(deploy(PLAN, lambda _: sagemaker, wait=False)) == []


def assert_moves_over(sagemaker: Any, plan: Plan) -> None:
    """The endpoint's description is there; the rest is made, and the endpoint updated."""
    absent(sagemaker, "describe_model")
    sagemaker.stub.add_response("create_model", {"ModelArn": "a" * 20})
    absent(sagemaker, "describe_endpoint_config")
    sagemaker.stub.add_response("create_endpoint_config", {"EndpointConfigArn": "a" * 20})
    wanted = {"EndpointName": "digits", "EndpointConfigName": plan.object_name}
    sagemaker.stub.add_response("update_endpoint", {"EndpointArn": "a" * 20}, wanted)
    assert list(deploy(plan, lambda _: sagemaker, wait=False))[-1] == "update_endpoint digits"


def test_another_plan_moves_the_endpoint_over(sagemaker: Any) -> None:
    old, new = PLAN, replace(PLAN, image=PLAN.image.replace("0", "1"))
    sagemaker.stub.add_response("describe_endpoint", described(old))
    assert_moves_over(sagemaker, new)


@pytest.mark.parametrize(
    ("kind", "instances", "kept"), [("scaled", 3, True), ("scaled", 0, False), ("plain", 3, False), ("async", 2, True)]
)
def test_an_endpoint_that_scales_keeps_its_instances_when_it_moves_over(kind: str, instances: int, kept: bool) -> None:
    change = calls_of(PLANS[kind], exists=True, instances=instances)[2]
    assert not problems(change)
    assert change.arguments.get("RetainAllVariantProperties", False) is kept


def test_other_variants_of_an_endpoint_do_not_count(sagemaker: Any) -> None:
    plan = PLANS["scaled"]
    theirs = [{"VariantName": "canary", "DesiredInstanceCount": 3}, {"VariantName": "AllTraffic"}]
    sagemaker.stub.add_response("describe_endpoint", {**described(PLAN), "ProductionVariants": theirs})
    assert_moves_over(sagemaker, plan)


def test_scaling_follows_once_the_endpoint_serves(sagemaker: Any) -> None:
    plan = PLANS["scaled"]
    scaling = clients("application-autoscaling")
    config = {"EndpointConfigName": "c", "EndpointConfigArn": "a" * 20, "CreationTime": 0}
    with Stubber(scaling) as stub:
        for _ in range(2):
            sagemaker.stub.add_response("describe_endpoint", described(plan))
            if not _:
                sagemaker.stub.add_response(
                    "describe_model", {"ModelName": "m", "CreationTime": 0, "ModelArn": "a" * 20}
                )
                variants = {"ProductionVariants": [{"VariantName": "v"}]}
                sagemaker.stub.add_response("describe_endpoint_config", config | variants)
        target, policy = scaling_of(plan)
        stub.add_response("register_scalable_target", {}, target.arguments)
        stub.add_response("put_scaling_policy", {"PolicyARN": "arn"}, policy.arguments)
        both = {"sagemaker": sagemaker, "application-autoscaling": scaling}
        lines = list(deploy(plan, both.__getitem__))
        stub.assert_no_pending_responses()
    scaling.close()
    assert lines[0] == "digits is in service"
    assert len(lines) == 3


def test_an_endpoint_without_instances_is_woken_by_an_alarm_on_what_waits(sagemaker: Any) -> None:
    plan = PLANS["async"]
    scaling, alarms = clients("application-autoscaling"), clients("cloudwatch")
    sagemaker.stub.add_response("describe_endpoint", described(plan))
    sagemaker.stub.add_response("describe_model", {"ModelName": "m", "CreationTime": 0, "ModelArn": "a" * 20})
    config = {"EndpointConfigName": "c", "EndpointConfigArn": "a" * 20, "CreationTime": 0}
    config["ProductionVariants"] = [{"VariantName": "v"}]
    sagemaker.stub.add_response("describe_endpoint_config", config)
    sagemaker.stub.add_response("describe_endpoint", described(plan))
    target, backlog, wake, alarm = scaling_of(plan)
    with Stubber(scaling) as policies, Stubber(alarms) as watch:
        policies.add_response("register_scalable_target", {}, target.arguments)
        policies.add_response("put_scaling_policy", {"PolicyARN": "backlog"}, backlog.arguments)
        policies.add_response("put_scaling_policy", {"PolicyARN": "wake"}, wake.arguments)
        watch.add_response("put_metric_alarm", {}, {**alarm.arguments, "AlarmActions": ["wake"]})
        all_of = {"sagemaker": sagemaker, "application-autoscaling": scaling, "cloudwatch": alarms}
        assert list(deploy(plan, all_of.__getitem__))[-1] == "put_metric_alarm digits-wake"
        watch.assert_no_pending_responses()
    scaling.close()
    alarms.close()


def test_a_refusal_that_is_not_absence_is_not_swallowed(sagemaker: Any) -> None:
    sagemaker.stub.add_client_error("describe_endpoint", "AccessDeniedException", "not you")
    with pytest.raises(sagemaker.exceptions.ClientError, match="not you"):
        list(deploy(PLAN, lambda _: sagemaker))


def test_a_dry_run_prints_every_call_and_makes_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "sagemaker", *ARGUMENTS, "--max-instances", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    plan, _ = plan_of([*ARGUMENTS, "--max-instances", "3"])
    for call in (*calls_of(plan, exists=False), *scaling_of(plan)):
        assert f"{call.service} {call.operation} {json.dumps(call.arguments, indent=1)}" in out


def test_misuse_of_the_command_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "sagemaker", *ARGUMENTS, "--serverless", "much"]) == 2
    assert "expected MB:CONCURRENCY" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["deploy", "mainframe", "x"])


def test_without_the_sdk_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    assert main(["deploy", "sagemaker", *ARGUMENTS, "--via", "sdk"]) == 1
    assert install_command("sagemaker-sdk") in capsys.readouterr().err
