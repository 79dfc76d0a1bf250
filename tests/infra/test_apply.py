"""The aws modules applied, read back, planned again and destroyed: the real provider against a stand-in of AWS (moto).

The tests read back what the stand-in got: it shows that the calls are accepted and say what the modules promise,
not that AWS would grant them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.terraform import MODULES, Prepared, mirrored

IMAGE = f"111122223333.dkr.ecr.eu-west-1.amazonaws.com/remora@sha256:{'0' * 64}"
SERVICES = ("applicationautoscaling", "cloudformation", "cloudwatch", "cloudwatchlogs", "ecr", "iam", "lambda", "s3")
SERVICES += ("sagemaker", "sts")
EXAMPLES = {
    "realtime": "aws-sagemaker/examples/realtime",
    "async": "aws-sagemaker/examples/async",
    "serverless": "aws-sagemaker/examples/serverless",
    "lambda": "lambda/examples/simple",
}
PROVIDER = """
provider "aws" {{
  region                      = "eu-west-1"
  access_key                  = "x"
  secret_key                  = "y"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
  s3_use_path_style           = true
  endpoints {{
{endpoints}
  }}
}}
"""
# Beside the examples, what they leave out: a bucket and a repository of the module's own.
WHOLE = f"""
module "whole" {{
  source            = "./aws-sagemaker"
  name              = "whole"
  model_uri         = "s3://whole-models/repository/"
  image_uri         = "{IMAGE}"
  environment       = {{ REMORA_LOG_LEVEL = "warn" }}
  create_bucket     = true
  models_path       = "./models"
  create_repository = true
  tags              = {{ team = "vision" }}
}}
"""
# What the stand-in does not keep, so that a second plan wants to set it again.
FORGOTTEN = {
    "aws_sagemaker_model": "enable_network_isolation comes back as false, and a vpc_config that is empty",
    "aws_sagemaker_endpoint": "deployment_config does not come back",
    "aws_lambda_function": "an image_config comes back that is empty",
}
# The tags of a scaling target do not come back either, and its policy is replaced with it.
FORGOTTEN_TAGS = {
    "module.whole.aws_appautoscaling_target.variant[0]",
    "module.whole.aws_appautoscaling_policy.concurrency[0]",
}
CREDENTIALS = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "eu-west-1"}

pytestmark = pytest.mark.timeout(400)


class Applied(NamedTuple):
    """What was seen of one life of the modules."""

    made: dict[str, Any]
    planned_again: dict[str, str]
    left: list[str]


@pytest.fixture(scope="module")
def stand_in() -> Iterator[str]:
    """The address of a stand-in for AWS."""
    pytest.importorskip("moto", reason="moto is not installed here: make test-infra")
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "servers" / "aws_stand_in.py")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture(scope="module")
def applied(tool: str, mirror: Path, stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Applied:
    """Everything made once, looked at, planned again, and destroyed."""
    folder = tmp_path_factory.mktemp("applied")
    for module in ("aws-sagemaker", "lambda"):
        shutil.copytree(MODULES[module], folder / module, ignore=shutil.ignore_patterns(".terraform*"))
    endpoints = "\n".join(f'    {service} = "{stand_in}"' for service in SERVICES)
    calls = "".join(
        f'module "{name}" {{\n  source = "./{place}"\n  image_uri = "{IMAGE}"\n}}\n' for name, place in EXAMPLES.items()
    )
    (folder / "main.tf").write_text(PROVIDER.format(endpoints=endpoints) + calls + WHOLE)
    (folder / "models" / "digits" / "1").mkdir(parents=True)
    (folder / "models" / "digits" / "1" / "model.onnx").write_bytes(b"weights")
    root = Prepared(folder, mirrored(mirror, folder / "rc"))
    quiet = ("-input=false", "-no-color")
    for step in (("init", *quiet), ("apply", "-auto-approve", "-parallelism=30", *quiet)):
        done = root.run(*step)
        assert done.returncode == 0, f"{step[0]}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    made = read_back(stand_in)
    done = root.run("plan", "-json", "-parallelism=30", "-input=false")
    assert done.returncode == 0, done.stdout[-4000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    changes = [event["change"] for event in events if event["type"] == "planned_change"]
    again = {change["resource"]["addr"]: change["resource"]["resource_type"] for change in changes}
    done = root.run("destroy", "-auto-approve", "-refresh=false", "-parallelism=30", *quiet)
    assert done.returncode == 0, f"destroy: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return Applied(made, again, list(_names(read_back(stand_in))))


def read_back(address: str) -> dict[str, Any]:
    """What the stand-in has, by AWS's own client: kind, name, description."""
    import boto3

    session = boto3.Session(**CREDENTIALS)

    def ask(service: str) -> Any:
        return session.client(service, endpoint_url=address)

    sagemaker, iam, s3, functions = ask("sagemaker"), ask("iam"), ask("s3"), ask("lambda")
    models = [each["ModelName"] for each in sagemaker.list_models()["Models"]]
    configurations = [each["EndpointConfigName"] for each in sagemaker.list_endpoint_configs()["EndpointConfigs"]]
    endpoints = [each["EndpointName"] for each in sagemaker.list_endpoints()["Endpoints"]]
    roles = [each["RoleName"] for each in iam.list_roles()["Roles"]]
    buckets = [each["Name"] for each in s3.list_buckets()["Buckets"]]
    names = [each["FunctionName"] for each in functions.list_functions()["Functions"]]
    scaling = ask("application-autoscaling")
    return {
        "models": {name: sagemaker.describe_model(ModelName=name) for name in models},
        "configurations": {
            name: sagemaker.describe_endpoint_config(EndpointConfigName=name) for name in configurations
        },
        "endpoints": {name: sagemaker.describe_endpoint(EndpointName=name) for name in endpoints},
        "roles": {name: iam.get_role(RoleName=name)["Role"] for name in roles},
        "policies": {
            name: iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]
            for name in roles
            for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]
        },
        "targets": {
            each["ResourceId"]: each
            for each in scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        },
        "scaling": {
            each["PolicyName"]: each
            for each in scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
        },
        "alarms": {each["AlarmName"]: each for each in ask("cloudwatch").describe_alarms()["MetricAlarms"]},
        "repositories": {each["repositoryName"]: each for each in ask("ecr").describe_repositories()["repositories"]},
        "buckets": {
            name: {
                "encryption": s3.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]["Rules"],
                "public": s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"],
                "versioning": s3.get_bucket_versioning(Bucket=name)["Status"],
            }
            for name in buckets
        },
        "functions": {name: functions.get_function_configuration(FunctionName=name) for name in names},
        "addresses": {name: functions.get_function_url_config(FunctionName=name) for name in names},
        "logs": {each["logGroupName"]: each for each in ask("logs").describe_log_groups()["logGroups"]},
    }


def _names(seen: dict[str, Any]) -> Iterator[str]:
    return (f"{kind}: {name}" for kind, found in seen.items() for name in found)


def one(found: dict[str, Any], name: str) -> Any:
    """What has a name that begins so: the modules add a hash, or what makes it unique."""
    (match,) = [value for key, value in found.items() if key == name or key.startswith(f"{name}-")]
    return match


# -- aws-sagemaker ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["remora-realtime", "remora-async", "remora-serverless", "whole"])
def test_an_endpoint_serves_by_the_configuration_that_names_its_model(name: str, applied: Applied) -> None:
    endpoint = applied.made["endpoints"][name]
    assert endpoint["EndpointStatus"] == "InService"
    configuration = applied.made["configurations"][endpoint["EndpointConfigName"]]
    assert configuration["EndpointConfigName"].startswith(f"{name}-")
    (variant,) = configuration["ProductionVariants"]
    model = applied.made["models"][variant["ModelName"]]
    assert model["ModelName"].startswith(f"{name}-")
    assert model["PrimaryContainer"]["Image"] == IMAGE
    assert model["ExecutionRoleArn"] in {role["Arn"] for role in applied.made["roles"].values()}


def test_a_gpu_endpoint_says_its_instance_its_ami_and_its_patience(applied: Applied) -> None:
    (variant,) = one(applied.made["configurations"], "remora-realtime")["ProductionVariants"]
    assert variant["InstanceType"] == "ml.g5.xlarge"
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 600
    assert variant["ModelDataDownloadTimeoutInSeconds"] == 900


def test_a_serverless_endpoint_says_its_memory_and_no_instance(applied: Applied) -> None:
    (variant,) = one(applied.made["configurations"], "remora-serverless")["ProductionVariants"]
    assert variant["ServerlessConfig"] == {"MemorySizeInMB": 3072, "MaxConcurrency": 10}
    assert "InstanceType" not in variant


def test_models_come_as_a_prefix_or_as_an_archive(applied: Applied) -> None:
    prefix = one(applied.made["models"], "remora-realtime")["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
    assert (prefix["S3Uri"], prefix["S3DataType"], prefix["CompressionType"]) == (
        "s3://example-models/repository/",
        "S3Prefix",
        "None",
    )
    archive = one(applied.made["models"], "remora-serverless")["PrimaryContainer"]
    assert archive["ModelDataUrl"] == "s3://example-models/small.tar.gz"
    assert "ModelDataSource" not in archive, "serverless endpoints and batch transform do not take it"


def test_the_containers_environment_is_what_was_given(applied: Applied) -> None:
    assert one(applied.made["models"], "whole")["PrimaryContainer"]["Environment"] == {"REMORA_LOG_LEVEL": "warn"}


def test_the_role_is_sagemakers_alone_and_reads_one_prefix(applied: Applied) -> None:
    (trust,) = one(applied.made["roles"], "remora-realtime")["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    statements = {each["Sid"]: each for each in one(applied.made["policies"], "remora-realtime")["Statement"]}
    assert statements["ReadModels"]["Resource"] == ["arn:aws:s3:::example-models/repository/*"]
    assert statements["PullImage"]["Resource"] == ["arn:aws:ecr:eu-west-1:*:repository/remora"]
    assert {name for name, each in statements.items() if each["Resource"] == ["*"]} == {"PullToken", "WriteMetrics"}
    answers = {each["Sid"]: each for each in one(applied.made["policies"], "remora-async")["Statement"]}
    assert answers["ReadRequests"]["Resource"] == ["arn:aws:s3:::example-requests/remora/*"]
    assert answers["WriteAnswers"]["Resource"] == ["arn:aws:s3:::example-answers/remora/*"]


def test_instances_follow_the_requests_under_way(applied: Applied) -> None:
    target = applied.made["targets"]["endpoint/remora-realtime/variant/remora"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    policy = applied.made["scaling"]["remora-realtime-concurrency"]["TargetTrackingScalingPolicyConfiguration"]
    assert policy["TargetValue"] == 8
    metric = policy["PredefinedMetricSpecification"]["PredefinedMetricType"]
    assert metric == "SageMakerVariantConcurrentRequestsPerModelHighResolution"


def test_the_first_asynchronous_instance_comes_by_an_alarm(applied: Applied) -> None:
    assert applied.made["targets"]["endpoint/remora-async/variant/remora"]["MinCapacity"] == 0
    wake = applied.made["scaling"]["remora-async-wake"]
    alarm = applied.made["alarms"]["remora-async-wake"]
    assert alarm["AlarmActions"] == [wake["PolicyARN"]]
    assert alarm["MetricName"] == "HasBacklogWithoutCapacity"


def test_every_endpoint_has_its_two_alarms(applied: Applied) -> None:
    for name in ("remora-realtime", "remora-async", "remora-serverless", "whole"):
        errors, latency = (applied.made["alarms"][f"{name}-{kind}"] for kind in ("errors", "latency"))
        dimensions = {each["Name"]: each["Value"] for each in errors["Dimensions"]}
        assert dimensions == {"EndpointName": name, "VariantName": "remora"}
        assert (errors["MetricName"], errors["Threshold"]) == ("Invocation5XXErrors", 5)
        assert (latency["ExtendedStatistic"], latency["Threshold"]) == ("p99", 5_000_000)


def test_the_bucket_is_closed_encrypted_and_versioned(applied: Applied) -> None:
    bucket = applied.made["buckets"]["whole-models"]
    assert set(bucket["public"].values()) == {True}
    assert bucket["versioning"] == "Enabled"
    (rule,) = bucket["encryption"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"


def test_the_repository_keeps_its_tags_and_looks_into_images(applied: Applied) -> None:
    repository = applied.made["repositories"]["whole"]
    assert repository["imageTagMutability"] == "IMMUTABLE"
    assert repository["imageScanningConfiguration"] == {"scanOnPush": True}


# -- lambda -----------------------------------------------------------------------------------------------------------


def test_the_function_is_configured_with_its_image_models_and_threads(applied: Applied) -> None:
    function = applied.made["functions"]["remora"]
    assert (function["PackageType"], function["MemorySize"], function["Timeout"]) == ("Image", 3538, 30)
    told = {"OMP_NUM_THREADS": "2", "REMORA_MODEL_REPOSITORY": "s3://example-models/small/"}
    assert function["Environment"]["Variables"] == told
    (trust,) = applied.made["roles"][function["Role"].rpartition("/")[2]]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "lambda.amazonaws.com"}


def test_the_function_reads_one_prefix_and_writes_one_log(applied: Applied) -> None:
    role = applied.made["functions"]["remora"]["Role"].rpartition("/")[2]
    statements = {each["Sid"]: each["Resource"] for each in applied.made["policies"][role]["Statement"]}
    assert set(statements) == {"ReadModels", "ListModels", "WriteLogs"}
    assert statements["ReadModels"] == ["arn:aws:s3:::example-models/small/*"]
    (log,) = statements["WriteLogs"]
    assert log.endswith(":log-group:/aws/lambda/remora:*")


def test_the_functions_address_takes_signed_requests_only(applied: Applied) -> None:
    assert applied.made["addresses"]["remora"]["AuthType"] == "AWS_IAM"


def test_the_functions_log_is_made_before_it_and_ends(applied: Applied) -> None:
    assert applied.made["logs"]["/aws/lambda/remora"]["retentionInDays"] == 30


# -- all of it --------------------------------------------------------------------------------------------------------


def test_a_second_plan_changes_nothing_that_the_stand_in_remembers(applied: Applied) -> None:
    again = {address for address, kind in applied.planned_again.items() if kind not in FORGOTTEN}
    assert again <= FORGOTTEN_TAGS


def test_destroying_leaves_nothing(applied: Applied) -> None:
    assert not applied.left


# -- what is planned and not applied ----------------------------------------------------------------------------------


def inference_components_can_be_made() -> bool:
    from moto.cloudformation.parsing import get_model_map

    return "AWS::SageMaker::InferenceComponent" in get_model_map()


def provisioned_concurrency_can_be_put() -> bool:
    from moto.awslambda.responses import LambdaResponse

    return any("provisioned" in name for name in dir(LambdaResponse))


def a_node_group_has_a_group_to_tag() -> bool:
    import boto3
    from moto import mock_aws

    with mock_aws():
        eks, role = boto3.client("eks", **CREDENTIALS), "arn:aws:iam::123456789012:role/node"
        eks.create_cluster(name="it", roleArn=role, resourcesVpcConfig={})
        eks.create_nodegroup(clusterName="it", nodegroupName="gpu", subnets=["subnet-0"], nodeRole=role)
        return bool(boto3.client("autoscaling", **CREDENTIALS).describe_auto_scaling_groups()["AutoScalingGroups"])


NOT_APPLIED: dict[str, tuple[Callable[[], bool], str]] = {
    "aws-sagemaker, mode scale-to-zero": (
        inference_components_can_be_made,
        "moto has no AWS::SageMaker::InferenceComponent, and takes no variant without a model",
    ),
    "lambda, kept_warm": (provisioned_concurrency_can_be_put, "moto has no PutProvisionedConcurrencyConfig"),
    "knative-gpu/eks": (
        a_node_group_has_a_group_to_tag,
        "moto makes no Auto Scaling group for a node group, so there is none to tag",
    ),
}


@pytest.mark.parametrize("what", NOT_APPLIED)
def test_what_is_not_applied_cannot_be(what: str) -> None:
    pytest.importorskip("moto", reason="moto is not installed here: make test-infra")
    possible, why = NOT_APPLIED[what]
    assert not possible(), f"{what}: moto has what was missing, so it can be applied with the others"
    pytest.skip(f"{what}: {why}")
