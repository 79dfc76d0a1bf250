"""Command `remora deploy sagemaker`, which creates or updates an endpoint and its scaling.

Calls are data that follow from the plan alone (`calls_of`), so a dry run needs neither credentials nor boto3. Names
contain a digest of the plan: the same plan again has no effect, and another plan creates new objects and updates the
endpoint without downtime. Nothing is deleted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, NamedTuple

from remora.system.install_advice import install_command

_NAME = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,51}")
"""Pattern that leaves room for the digest within the 63 characters of a name."""
_VARIANT = "AllTraffic"
_INSTANCE = "ml.c6i.xlarge"
_GPU = re.compile(r"ml\.(?:g|p)[0-9]")
_GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""AMI with a driver for CUDA 13, which current runtimes require."""
_ARCHIVES = (".tar.gz", ".tgz")
_DIMENSION = "sagemaker:variant:DesiredInstanceCount"
_CONCURRENCY = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
_OUT_S = 60
"""Cooldown after a scale-out, in seconds."""
_POLICY = "ARN-OF-THE-POLICY-BEFORE"
"""Placeholder for the answer of the previous call."""
_SERVERLESS_MB = range(1024, 6145, 1024)


@dataclass(frozen=True, slots=True)
class Plan:
    """Desired state of an endpoint.

    Attributes:
        name: name of the endpoint.
        image: container image, by digest or tag.
        model: archive or folder in S3; with ``multi_model`` the prefix of the archives.
        role: ARN of the endpoint's execution role.
        instance: instance type.
        least, most: limits of the instance count; scaling is set up if they differ.
        target: concurrent requests per instance that scaling aims at; queued ones for an asynchronous endpoint.
        startup_s: startup timeout of a container, 60 to 3600.
        multi_model: True if ``model`` is a prefix of archives that are loaded on demand.
        answers: S3 location of an asynchronous endpoint's answers; "" for a synchronous one.
        serverless: memory in MB and maximum concurrency, None for instances.
        environ: environment of the container.
    """

    name: str
    image: str
    model: str
    role: str
    instance: str = _INSTANCE
    least: int = 1
    most: int = 1
    target: float = 8.0
    startup_s: int = 600
    multi_model: bool = False
    answers: str = ""
    serverless: tuple[int, int] | None = None
    environ: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Raise ValueError for values that the platform would refuse, or accept and not serve."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name}: a name has at most 52 letters and digits, with hyphens between them")
        if not self.model.startswith("s3://"):
            raise ValueError(f"{self.model}: the model must be in S3, such as s3://bucket/models/digits/")
        if not 60 <= self.startup_s <= 3600:
            raise ValueError(f"--startup-timeout={self.startup_s}: expected 60 to 3600 seconds")
        if not (0 <= self.least <= self.most and self.most > 0):
            raise ValueError(
                f"--instances={self.least} --max-instances={self.most}: the maximum must be at least 1 and the minimum"
            )
        if not 0 < self.target < math.inf:
            raise ValueError(f"--target={self.target:g}: expected a positive number of requests")
        if self.least == 0 and not self.answers:
            raise ValueError("--instances=0: only an asynchronous endpoint (--async) can have no instance")
        if self.serverless and (self.multi_model or self.answers or self.most != self.least):
            raise ValueError("a serverless endpoint has one model, answers at once and scales by itself")
        if self.multi_model and _GPU.match(self.instance):
            raise ValueError(
                f"--multi-model --instance-type={self.instance}: on GPUs SageMaker accepts only Triton's container for "
                "many models; use an instance without a GPU, or inference components"
            )
        if self.serverless and (self.serverless[0] not in _SERVERLESS_MB or not 1 <= self.serverless[1] <= 200):
            raise ValueError("--serverless=MB:CONCURRENCY: expected 1024, 2048 ... 6144 MB and 1 to 200")
        if self.answers and not self.answers.startswith("s3://"):
            raise ValueError(f"--async={self.answers}: expected an S3 location, such as s3://bucket/answers/")

    @property
    def object_name(self) -> str:
        """Name of the model and the configuration, made of the endpoint's and the plan's digest."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:10]}"


class ApiCall(NamedTuple):
    """Call of an AWS service, ``boto3.client(service).operation(**arguments)``."""

    service: str
    operation: str
    arguments: dict[str, Any]


def calls_of(plan: Plan, *, exists: bool, instances: int = 0) -> list[ApiCall]:
    """Return the calls that apply a plan, in order.

    ``exists`` is True for an existing endpoint, with ``instances``. A scaling endpoint retains its instance count,
    because the new configuration would reset it to the minimum under load.
    """
    name = plan.object_name
    endpoint: dict[str, Any] = {"EndpointName": plan.name, "EndpointConfigName": name}
    if exists and instances and scaling_of(plan):
        endpoint["RetainAllVariantProperties"] = True
    return [
        ApiCall(
            "sagemaker",
            "create_model",
            {"ModelName": name, "ExecutionRoleArn": plan.role, "PrimaryContainer": _container(plan)},
        ),
        ApiCall("sagemaker", "create_endpoint_config", _config(plan, name)),
        ApiCall("sagemaker", "update_endpoint" if exists else "create_endpoint", endpoint),
    ]


def scaling_of(plan: Plan) -> list[ApiCall]:
    """Return the calls that set up scaling, valid once the endpoint is in service."""
    if plan.serverless or plan.least == plan.most:
        return []
    where = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{plan.name}/variant/{_VARIANT}",
        "ScalableDimension": _DIMENSION,
    }
    metric: dict[str, Any] = {"PredefinedMetricSpecification": {"PredefinedMetricType": _CONCURRENCY}}
    if plan.answers:
        metric = {
            "CustomizedMetricSpecification": {
                "Namespace": "AWS/SageMaker",
                "MetricName": "ApproximateBacklogSizePerInstance",
                "Dimensions": [{"Name": "EndpointName", "Value": plan.name}],
                "Statistic": "Average",
            }
        }
    policy = {"TargetValue": plan.target, "ScaleInCooldown": 300, "ScaleOutCooldown": _OUT_S, **metric}
    calls = [
        ApiCall(
            "application-autoscaling",
            "register_scalable_target",
            {**where, "MinCapacity": plan.least, "MaxCapacity": plan.most},
        ),
        ApiCall(
            "application-autoscaling",
            "put_scaling_policy",
            {
                **where,
                "PolicyName": f"{plan.name}-requests",
                "PolicyType": "TargetTrackingScaling",
                "TargetTrackingScalingPolicyConfiguration": policy,
            },
        ),
    ]
    return calls if plan.least else [*calls, *_waking(plan, where)]


def _waking(plan: Plan, where: dict[str, str]) -> list[ApiCall]:
    """Return the calls that start the first instance, for which a backlog is undefined."""
    step = {"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}
    policy = {
        "AdjustmentType": "ChangeInCapacity",
        "MetricAggregationType": "Maximum",
        "Cooldown": _OUT_S,
        "StepAdjustments": [step],
    }
    name = f"{plan.name}-wake"
    return [
        ApiCall(
            "application-autoscaling",
            "put_scaling_policy",
            {**where, "PolicyName": name, "PolicyType": "StepScaling", "StepScalingPolicyConfiguration": policy},
        ),
        ApiCall(
            "cloudwatch",
            "put_metric_alarm",
            {
                "AlarmName": name,
                "Namespace": "AWS/SageMaker",
                "MetricName": "HasBacklogWithoutCapacity",
                "Dimensions": [{"Name": "EndpointName", "Value": plan.name}],
                "Statistic": "Average",
                "Period": 60,
                "EvaluationPeriods": 1,
                "ComparisonOperator": "GreaterThanOrEqualToThreshold",
                "Threshold": 1.0,
                "TreatMissingData": "missing",
                "AlarmActions": [_POLICY],
            },
        ),
    ]


def _container(plan: Plan) -> dict[str, Any]:
    container: dict[str, Any] = {"Image": plan.image, "Environment": dict(plan.environ)}
    if plan.multi_model:
        return {**container, "Mode": "MultiModel", "ModelDataUrl": plan.model}
    packed = plan.model.endswith(_ARCHIVES)
    source = {
        "S3Uri": plan.model if packed else f"{plan.model.rstrip('/')}/",
        "S3DataType": "S3Object" if packed else "S3Prefix",
        "CompressionType": "Gzip" if packed else "None",
    }
    return {**container, "ModelDataSource": {"S3DataSource": source}}


def _config(plan: Plan, name: str) -> dict[str, Any]:
    variant: dict[str, Any] = {"VariantName": _VARIANT, "ModelName": name}
    if plan.serverless:
        memory, concurrency = plan.serverless
        variant["ServerlessConfig"] = {"MemorySizeInMB": memory, "MaxConcurrency": concurrency}
    else:
        variant |= {
            "InstanceType": plan.instance,
            "InitialInstanceCount": max(plan.least, 1),
            "InitialVariantWeight": 1.0,
            "ContainerStartupHealthCheckTimeoutInSeconds": plan.startup_s,
            "ModelDataDownloadTimeoutInSeconds": plan.startup_s,
            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        }
        if _GPU.match(plan.instance):
            variant["InferenceAmiVersion"] = _GPU_AMI
    config: dict[str, Any] = {"EndpointConfigName": name, "ProductionVariants": [variant]}
    if plan.answers:
        config["AsyncInferenceConfig"] = {"OutputConfig": {"S3OutputPath": plan.answers}}
    return config


# -- applying a plan ------------------------------------------------------------------------------------------------


def deploy(
    plan: Plan, clients: Any, *, wait: bool = True, make: Callable[[ApiCall], object] | None = None
) -> Iterator[str]:
    """Apply a plan and yield a line for each step.

    ``clients`` returns the client of a service. ``make`` replaces the client for SageMaker's calls that create or
    update. Raises botocore's ClientError and WaiterError.
    """

    def by_client(call: ApiCall) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(clients(call.service), call.operation)(**call.arguments)
        return answer

    make = make or by_client
    sagemaker = clients("sagemaker")
    missing = sagemaker.exceptions.ClientError
    name = plan.object_name

    def found(operation: str, **arguments: str) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = getattr(sagemaker, operation)(**arguments)
            return answer
        except missing as error:
            if error.response["Error"]["Code"] != "ValidationException":  # SageMaker's code for a missing object
                raise
            return None

    endpoint = found("describe_endpoint", EndpointName=plan.name)
    variants = (endpoint or {}).get("ProductionVariants", [])
    instances = sum(each.get("DesiredInstanceCount", 0) for each in variants if each["VariantName"] == _VARIANT)
    model, config, change = calls_of(plan, exists=endpoint is not None, instances=instances)
    if found("describe_model", ModelName=name) is None:
        make(model)
        yield _describe(model)
    if found("describe_endpoint_config", EndpointConfigName=name) is None:
        make(config)
        yield _describe(config)
    if endpoint is None or endpoint["EndpointConfigName"] != name:
        make(change)
        yield _describe(change)
    if not wait:
        return
    sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=plan.name)
    yield f"{plan.name} is in service"
    policy = ""
    for call in scaling_of(plan):
        if "AlarmActions" in call.arguments:
            call = call._replace(arguments={**call.arguments, "AlarmActions": [policy]})
        policy = by_client(call).get("PolicyARN", "")
        yield _describe(call)


def _describe(call: ApiCall) -> str:
    named = next((value for key, value in call.arguments.items() if key.endswith("Name")), "")
    return f"{call.operation} {named}".rstrip()


# -- command line ---------------------------------------------------------------------------------------------------


def plan_of(arguments: Sequence[str]) -> tuple[Plan, argparse.Namespace]:
    """Parse the command line to a plan and the other options. Raises ValueError."""
    parser = argparse.ArgumentParser(
        prog="remora deploy sagemaker", description="Create or update a SageMaker endpoint that serves a model from S3."
    )
    parser.add_argument("name", metavar="NAME", help="name of the endpoint")
    parser.add_argument("--image", required=True, metavar="URI", help="container image in ECR")
    parser.add_argument(
        "--model", required=True, metavar="S3", help="model folder or .tar.gz, such as s3://bucket/digits/"
    )
    parser.add_argument("--role", required=True, metavar="ARN", help="execution role of the endpoint")
    parser.add_argument("--instance-type", default=_INSTANCE, metavar="TYPE", help="type (default %(default)s)")
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="minimum (default %(default)s)")
    parser.add_argument("--max-instances", type=int, default=0, metavar="N", help="maximum; enables scaling")
    parser.add_argument("--target", type=float, default=8.0, metavar="N", help="requests per instance (default 8)")
    parser.add_argument(
        "--startup-timeout",
        type=int,
        default=600,
        metavar="S",
        help="startup timeout, in seconds (default %(default)s)",
    )
    parser.add_argument("--multi-model", action="store_true", help="take --model as a prefix of archives")
    parser.add_argument(
        "--async",
        dest="answers",
        default="",
        metavar="S3",
        help="create an asynchronous endpoint with answers in this location",
    )
    parser.add_argument(
        "--serverless", default="", metavar="MB:CONCURRENCY", help="no instances; memory and concurrency"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable; repeatable")
    parser.add_argument("--region", default=None, help="AWS region (default: the configured one)")
    parser.add_argument(
        "--via",
        choices=("boto3", "sdk"),
        default="boto3",
        help="client of the calls; sdk: the sagemaker SDK with its configured defaults",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the calls only, without credentials")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the endpoint or set up scaling")
    options = parser.parse_args(arguments)
    memory, _, concurrency = options.serverless.partition(":")
    if options.serverless and not (memory.isdigit() and concurrency.isdigit()):
        raise ValueError(f"--serverless={options.serverless}: expected MB:CONCURRENCY, such as 2048:20")
    if any("=" not in pair for pair in options.env):
        raise ValueError("--env: expected NAME=VALUE")
    plan = Plan(
        options.name,
        options.image,
        options.model,
        options.role,
        options.instance_type,
        options.instances,
        options.max_instances or max(options.instances, 1),
        options.target,
        options.startup_timeout,
        options.multi_model,
        options.answers,
        (int(memory), int(concurrency)) if options.serverless else None,
        tuple((name, value) for name, _, value in (pair.partition("=") for pair in options.env)),
    )
    plan.check()
    return plan, options


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    try:
        plan, options = plan_of(arguments)
    except ValueError as error:
        print(f"remora deploy sagemaker: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        for call in (*calls_of(plan, exists=False), *scaling_of(plan)):
            print(f"{call.service} {call.operation} {json.dumps(call.arguments, indent=1)}")
        print("An existing endpoint is updated (update_endpoint) instead of created.")
        return 0
    try:
        import boto3  # imported here because only this command needs it and it takes 0.2 s
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        print(f"remora deploy sagemaker: needs boto3: {install_command('deploy-sagemaker')}", file=sys.stderr)
        return 1
    session = boto3.Session(region_name=options.region)
    make = None
    if options.via == "sdk":
        try:
            make = import_module("remora_adapters.sagemaker.sdk_session").make_caller(session)
        except ImportError:
            print(f"remora deploy sagemaker: needs the SDK: {install_command('sagemaker-sdk')}", file=sys.stderr)
            return 1
        except ValueError as error:  # no region
            print(f"remora deploy sagemaker: {error}", file=sys.stderr)
            return 1
    try:
        for line in deploy(plan, session.client, wait=not options.no_wait, make=make):
            print(line, flush=True)
    except (BotoCoreError, ClientError) as error:
        print(f"remora deploy sagemaker: {error}", file=sys.stderr)
        return 1
    return 0
