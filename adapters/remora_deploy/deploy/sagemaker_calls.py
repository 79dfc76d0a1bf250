"""Desired state of a SageMaker endpoint, and the calls that describe it to AWS."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remora.system.url_secrets import shown_place
from remora_deploy.deploy.plan import Call, Kept, digest_of
from remora_deploy.deploy.shares import check_share
from remora_deploy.pod import with_required_gpu

NAME = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,51}")
"""Pattern that leaves room for the digest within the 63 characters of a name."""
VARIANT = "AllTraffic"
CANARY = "Canary"
SHADOW = "Shadow"
INSTANCE = "ml.c6i.xlarge"
GPU = re.compile(r"ml\.(?:g|gr|p)[0-9]")
_GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""AMI with a driver for CUDA 13, which current runtimes require."""
_ARCHIVES = (".tar.gz", ".tgz")
_DATA_URL = ".tar.gz"
"""End of an archive's name that every kind of endpoint and batch transform take; the latter two take no folder."""
_DIMENSION = "sagemaker:variant:DesiredInstanceCount"
_CONCURRENCY = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
_OUT_S = 60
"""Cooldown after a scale-out, in seconds."""
RETAINED = {
    "RetainAllVariantProperties": True,
    "ExcludeRetainedVariantProperties": [
        {"VariantPropertyType": "DesiredWeight"},
        {"VariantPropertyType": "DataCaptureConfig"},
    ],
}
"""Members of an update that retain the instance counts, and nothing else."""
_CONTENT_LETTERS, _COUNT_LETTERS = 6, 4
_SERVERLESS_MB = range(1024, 6145, 1024)
_LEAST_LINEAR = 10
"""Least LinearStepSize, in percent."""
_ROLLOUTS = ("all-at-once", "canary", "linear", "rolling")


@dataclass(frozen=True, slots=True)
class Rollout:
    """How traffic moves to new instances.

    Attributes:
        kind: all-at-once, canary, linear or rolling.
        share: percentage of the instances in a step.
        bake_s: waiting time after a step.
        alarms: CloudWatch alarms that take an update back.
    """

    kind: str = "all-at-once"
    share: int = 25
    bake_s: int = 300
    alarms: tuple[str, ...] = ()

    @property
    def is_guarded(self) -> bool:
        """True if an update has deployment guardrails."""
        return self.kind != "all-at-once" or bool(self.alarms)

    def check(self) -> None:
        """Raise ValueError for values that the platform would refuse."""
        if self.kind not in _ROLLOUTS:
            raise ValueError(f"--rollout={self.kind}: expected one of {', '.join(_ROLLOUTS)}")
        if not 5 <= self.share <= 50 and self.kind != "all-at-once":
            raise ValueError(f"--rollout-step={self.share}: expected 5 to 50 percent")
        if self.kind == "linear" and self.share < _LEAST_LINEAR:
            raise ValueError(f"--rollout-step={self.share}: a linear rollout has steps of 10 to 50 percent")
        if not 0 <= self.bake_s <= 3600:
            raise ValueError(f"--bake={self.bake_s}: expected 0 to 3600 seconds")


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
        sized: False if no limits were requested, so that an endpoint retains its count and its scaling.
        count: instances at the start, 0 for the minimum.
        target: concurrent requests per instance that scaling aims at; queued ones for an asynchronous endpoint.
        startup_s: startup timeout of a container, 60 to 3600.
        download_s: time limit of the models' download, 0 for that of the startup.
        multi_model: True if ``model`` is a prefix of archives that are loaded on demand.
        answers: S3 location of an asynchronous endpoint's answers; "" for a synchronous one.
        serverless: memory in MB and maximum concurrency, None for instances.
        environ: environment of the container.
        traffic: percentage of the requests that the new version gets beside the current one; 100 replaces it.
        shadow: percentage of the requests that are copied to the new version, whose answers are dropped.
        rollout: how traffic moves to new instances.
        capture: S3 location of captured requests and answers, "" for none.
        capture_share: percentage of the requests that are captured.
    """

    name: str
    image: str
    model: str
    role: str
    instance: str = INSTANCE
    least: int = 1
    most: int = 1
    target: float = 8.0
    startup_s: int = 600
    multi_model: bool = False
    answers: str = ""
    serverless: tuple[int, int] | None = None
    environ: tuple[tuple[str, str], ...] = ()
    traffic: int = 100
    shadow: int = 0
    rollout: Rollout = Rollout()
    capture: str = ""
    capture_share: int = 100
    sized: bool = True
    count: int = 0
    download_s: int = 0

    def check(self) -> None:
        """Raise ValueError for values that the platform would refuse, or accept and not serve."""
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name}: a name has at most 52 letters and digits, with hyphens between them")
        if not self.model.startswith("s3://"):
            raise ValueError(f"{shown_place(self.model)}: the model must be in S3, such as s3://bucket/models/digits/")
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
        if self.multi_model and GPU.match(self.instance):
            raise ValueError(
                f"--multi-model --instance-type={self.instance}: on GPUs SageMaker accepts only Triton's container for "
                "many models; use an instance without a GPU, or inference components"
            )
        if self.serverless and (self.serverless[0] not in _SERVERLESS_MB or not 1 <= self.serverless[1] <= 200):
            raise ValueError("--serverless=MB:CONCURRENCY: expected 1024, 2048 ... 6144 MB and 1 to 200")
        if self.answers and not self.answers.startswith("s3://"):
            raise ValueError(
                f"--async={shown_place(self.answers)}: expected an S3 location, such as s3://bucket/answers/"
            )
        if self.capture and not self.capture.startswith("s3://"):
            raise ValueError(
                f"--capture={shown_place(self.capture)}: expected an S3 location, such as s3://bucket/captured/"
            )
        if self.capture and (self.answers or self.serverless or self.multi_model):
            raise ValueError("--capture needs a synchronous endpoint with one model on instances")
        if not 1 <= self.capture_share <= 100:
            raise ValueError(f"--capture-percent={self.capture_share}: expected 1 to 100 percent")
        self._check_shares()
        self.rollout.check()
        if self.serverless and not self.model.endswith(_DATA_URL):
            raise ValueError(
                f"--serverless --model={shown_place(self.model)}: a serverless endpoint takes one archive, "
                "NAME.tar.gz: pass the folder with --bucket, which packs it, or tar -czf model.tar.gz -C FOLDER ."
            )

    def _check_shares(self) -> None:
        check_share(self.traffic)
        if self.is_trial and self.rollout.is_guarded:
            raise ValueError(
                "--rollout and --alarm need the variant that the endpoint has: --traffic and --shadow add another one, "
                "so pass them without guardrails"
            )
        if not 0 <= self.shadow <= 100:
            raise ValueError(f"--shadow={self.shadow}: expected 0 to 100 percent")
        if self.shadow and self.traffic != 100:
            raise ValueError("--shadow and --traffic exclude each other: a shadow's answers are dropped")
        if (self.shadow or self.traffic != 100) and (self.serverless or self.answers or self.multi_model):
            raise ValueError("--shadow and --traffic need a synchronous endpoint with one model on instances")

    @property
    def gpu(self) -> bool:
        """True for an instance type with GPUs."""
        return self.serverless is None and GPU.match(self.instance) is not None

    @property
    def is_trial(self) -> bool:
        """True for a share or a shadow beside the version that serves."""
        return self.traffic != 100 or self.shadow > 0

    @property
    def model_name(self) -> str:
        """Name of the model: the endpoint's with a digest of all that a container gets."""
        return f"{self.name}-{_digest([self.role, container_of(self)])}"


def model_call(plan: Plan) -> Call:
    """Return the call that creates the model."""
    arguments = {
        "ModelName": plan.model_name,
        "ExecutionRoleArn": plan.role,
        "PrimaryContainer": container_of(plan),
    }
    return Call("sagemaker", "create_model", arguments)


def config_call(
    plan: Plan, current: Sequence[Mapping[str, Any]] = (), settings: Mapping[str, Any] = types.MappingProxyType({})
) -> Call:
    """Return the call that creates the endpoint configuration.

    ``current`` holds the variants that serve, with their running counts, and ``settings`` the other members of their
    configuration, which a share or a shadow leaves as they are.
    """
    new = _variant(plan)
    stable = next((dict(each) for each in current if each.get("VariantName") == VARIANT), None)
    if stable is None or not plan.is_trial:
        return named_config(plan.name, {"ProductionVariants": [new], **_settings(plan)})
    settings = {**settings, **_settings(plan)}
    if plan.shadow:
        production, shadows = [_weighted(stable, VARIANT, 100)], [_weighted(new, SHADOW, plan.shadow)]
        return named_config(
            plan.name, {"ProductionVariants": production, "ShadowProductionVariants": shadows, **settings}
        )
    shares = [_weighted(stable, VARIANT, 100 - plan.traffic), _weighted(new, CANARY, plan.traffic)]
    return named_config(plan.name, {"ProductionVariants": shares, **settings})


def release_call(stable: Plan, arms: Sequence[tuple[str, Plan, float]], shadow: tuple[Plan, float] | None) -> Call:
    """Return the call that creates the configuration of a release.

    ``arms`` holds name, plan and percentage of each version beside the stable one, ``shadow`` the plan and percentage
    of the one that gets copies. Raises ValueError for a shadow beside arms, which the platform refuses.
    """
    if shadow is not None and arms:
        raise ValueError(
            "SageMaker has shadow variants only beside one production variant: end the canary or the shadow"
        )
    rest = 100 - sum(percent for _, _, percent in arms)
    production = [_weighted(_variant(stable), VARIANT, rest)]
    production += [_weighted(_variant(plan), name, percent) for name, plan, percent in arms]
    found: dict[str, Any] = {"ProductionVariants": production, **_settings(stable)}
    if shadow is not None:
        found["ShadowProductionVariants"] = [_weighted(_variant(shadow[0]), SHADOW, shadow[1])]
    return named_config(stable.name, found)


def _weighted(variant: Mapping[str, Any], name: str, percent: float) -> dict[str, Any]:
    return {**variant, "VariantName": name, "InitialVariantWeight": percent / 100}


def _settings(plan: Plan) -> dict[str, Any]:
    """Return the members of a configuration beside its variants."""
    config: dict[str, Any] = {}
    if plan.answers:
        config["AsyncInferenceConfig"] = {"OutputConfig": {"S3OutputPath": plan.answers}}
    if plan.capture:
        config["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": plan.capture_share,
            "DestinationS3Uri": plan.capture,
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
            "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"], "CsvContentTypes": ["text/csv"]},
        }
    return config


def named_config(endpoint: str, config: Mapping[str, Any]) -> Call:
    """Return the call that creates a configuration, named by its content and its counts."""
    counted = json.loads(json.dumps(config, default=str))
    counts = [
        each.pop("InitialInstanceCount", None)
        for key in ("ProductionVariants", "ShadowProductionVariants")
        for each in counted.get(key, ())
    ]
    digest = digest_of(counted, _CONTENT_LETTERS) + digest_of(counts, _COUNT_LETTERS)
    return Call("sagemaker", "create_endpoint_config", {"EndpointConfigName": f"{endpoint}-{digest}", **config})


def same_but_counts(one: str, other: str) -> bool:
    """Return True for the names of configurations that differ at most in instance counts."""
    return one[:-_COUNT_LETTERS] == other[:-_COUNT_LETTERS]


def endpoint_call(plan: Plan, config: str, *, exists: bool, instances: int = 0) -> Call:
    """Return the call that creates or updates the endpoint.

    With ``instances`` running the endpoint retains its counts, which scaling may change until the call is made. The
    variants that are new get those of the configuration.
    """
    arguments: dict[str, Any] = {"EndpointName": plan.name, "EndpointConfigName": config}
    if not exists:
        return Call("sagemaker", "create_endpoint", arguments)
    if instances:
        arguments |= RETAINED
    deployment = _deployment(plan.rollout)
    if deployment:
        arguments["DeploymentConfig"] = deployment
    return Call("sagemaker", "update_endpoint", arguments)


def calls_of(plan: Plan) -> list[Call]:
    """Return the calls of a first deployment, without scaling."""
    config = config_call(plan)
    return [model_call(plan), config, endpoint_call(plan, config.arguments["EndpointConfigName"], exists=False)]


def scaled(name: str) -> dict[str, str]:
    """Return the identification of an endpoint's scalable target."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": _DIMENSION,
    }


def scaling_of(plan: Plan) -> list[Call]:
    """Return the calls that set up scaling, valid once the endpoint is in service."""
    if plan.serverless or plan.least == plan.most:
        return []
    where = scaled(plan.name)
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
    limits = {"MinCapacity": plan.least, "MaxCapacity": plan.most}
    requests = {
        **where,
        "PolicyName": f"{plan.name}-requests",
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": policy,
    }
    calls = [
        Call("application-autoscaling", "register_scalable_target", {**where, **limits}),
        Call("application-autoscaling", "put_scaling_policy", requests),
    ]
    return calls if plan.least else [*calls, *_waking(plan, where)]


def _waking(plan: Plan, where: dict[str, str]) -> list[Call]:
    """Return the calls that start the first instance, for which a backlog is undefined."""
    policy = {
        "AdjustmentType": "ChangeInCapacity",
        "MetricAggregationType": "Maximum",
        "Cooldown": _OUT_S,
        "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
    }
    name = wake_alarm(plan.name)
    step = {**where, "PolicyName": name, "PolicyType": "StepScaling", "StepScalingPolicyConfiguration": policy}
    alarm = {
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
        "AlarmActions": [Kept("wake", "PolicyARN")],
    }
    return [Call("application-autoscaling", "put_scaling_policy", step), Call("cloudwatch", "put_metric_alarm", alarm)]


def wake_alarm(name: str) -> str:
    """Return the name of the alarm and policy that start the first instance."""
    return f"{name}-wake"


def container_of(plan: Plan) -> dict[str, Any]:
    """Return the container of the model."""
    container: dict[str, Any] = {
        "Image": plan.image,
        "Environment": with_required_gpu(dict(plan.environ), gpu=plan.gpu),
    }
    if plan.multi_model:
        return {**container, "Mode": "MultiModel", "ModelDataUrl": plan.model}
    if plan.model.endswith(_DATA_URL):
        return {**container, "ModelDataUrl": plan.model}
    packed = plan.model.endswith(_ARCHIVES)
    source = {
        "S3Uri": plan.model if packed else f"{plan.model.rstrip('/')}/",
        "S3DataType": "S3Object" if packed else "S3Prefix",
        "CompressionType": "Gzip" if packed else "None",
    }
    return {**container, "ModelDataSource": {"S3DataSource": source}}


def _variant(plan: Plan) -> dict[str, Any]:
    variant: dict[str, Any] = {"VariantName": VARIANT, "ModelName": plan.model_name}
    if plan.serverless:
        memory, concurrency = plan.serverless
        return {**variant, "ServerlessConfig": {"MemorySizeInMB": memory, "MaxConcurrency": concurrency}}
    variant |= {
        "InstanceType": plan.instance,
        "InitialInstanceCount": plan.count or max(plan.least, 1),
        "InitialVariantWeight": 1.0,
        "ContainerStartupHealthCheckTimeoutInSeconds": plan.startup_s,
        "ModelDataDownloadTimeoutInSeconds": plan.download_s or plan.startup_s,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if plan.gpu:
        variant["InferenceAmiVersion"] = _GPU_AMI
    return variant


def _deployment(rollout: Rollout) -> dict[str, Any]:
    """Return SageMaker's deployment guardrails; {} for its default."""
    share = {"Type": "CAPACITY_PERCENT", "Value": rollout.share}
    policy: dict[str, Any] = {}
    if rollout.kind == "rolling":
        policy["RollingUpdatePolicy"] = {"MaximumBatchSize": share, "WaitIntervalInSeconds": rollout.bake_s}
    elif rollout.kind != "all-at-once" or rollout.alarms:
        routing: dict[str, Any] = {
            "Type": rollout.kind.replace("-", "_").upper(),
            "WaitIntervalInSeconds": rollout.bake_s,
        }
        if rollout.kind != "all-at-once":
            routing[f"{rollout.kind.capitalize()}{'Size' if rollout.kind == 'canary' else 'StepSize'}"] = share
        policy["BlueGreenUpdatePolicy"] = {"TrafficRoutingConfiguration": routing}
    if rollout.alarms:
        policy["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in rollout.alarms]}
    return policy


def _digest(value: object) -> str:
    return digest_of(value, 10)
