"""Checks before a deployment to SageMaker, and the least policy of an endpoint's role."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remora_deploy.deploy.aws import account_checks, allow, bucket_check, trust_check
from remora_deploy.deploy.golden import Golden
from remora_deploy.deploy.images import Needs, image_check
from remora_deploy.deploy.plan import Call, Check, Unknown
from remora_deploy.deploy.sagemaker_calls import Plan
from remora_deploy.deploy.uploads import Source

_CUDA = 13
"""Of the driver in the AMI that `sagemaker_calls` chooses for GPUs."""
ACCOUNT = "ACCOUNT"
"""Placeholder until the checks have read the account."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Desired state beyond the endpoint's plan.

    Attributes:
        plan: the endpoint.
        source: the model, which may be a folder to upload.
        create_role: True if the role is created with the least policy.
        replace: True to delete an endpoint that failed.
        keep: versions to retain besides the one that serves.
        golden: the golden request, or None.
        price: price of an instance per hour, 0 if unknown.
    """

    plan: Plan
    source: Source
    create_role: bool
    replace: bool = False
    keep: int = 3
    golden: Golden | None = None
    price: float = 0.0
    account: str = ACCOUNT


def checks_of(wanted: Wanted, region: str) -> Sequence[Check]:
    """Return the checks before a deployment."""
    plan = wanted.plan
    checks = [*account_checks(region), bucket_check(wanted.source.location, region)]
    if not plan.serverless:
        checks.append(_quota(plan))
    needs = Needs("sagemaker", docker_only=True, single=True, gpu=plan.gpu, cuda=_CUDA)
    checks.append(image_check(plan.image, needs))
    if not wanted.create_role:
        checks += _role_checks(wanted)
    if plan.rollout.alarms:
        alarms = {"AlarmNames": list(plan.rollout.alarms)}
        checks.append(
            Check(
                "alarms",
                Call("cloudwatch", "describe_alarms", alarms),
                lambda answer: _missing(plan.rollout.alarms, answer),
                cure="aws cloudwatch put-metric-alarm --alarm-name NAME ...",
            )
        )
    return checks


def _quota(plan: Plan) -> Check:
    label = f"{plan.instance} for endpoint usage"

    def judge(answer: Any) -> str:
        quotas = {each.get("QuotaName"): each for each in answer.get("Quotas", [])}
        found = quotas.get(label)
        if found is None:
            return Unknown("not checked: the account lists no value, and AWS's default may be 0")
        if found.get("Value", 0) >= max(plan.least, 1):
            return ""
        return f"{found['Value']:g} instances of {plan.instance} are allowed, and {max(plan.least, 1)} are needed"

    return Check(
        f"quota of {label}",
        Call("service-quotas", "list_service_quotas", {"ServiceCode": "sagemaker", "MaxResults": 100}),
        judge,
        cure="aws service-quotas request-service-quota-increase --service-code sagemaker --quota-code "
        f"$(aws service-quotas list-service-quotas --service-code sagemaker --query "
        f"\"Quotas[?QuotaName=='{label}'].QuotaCode\" --output text) --desired-value {plan.most}",
        needed=False,
        absent="",
    )


def _role_checks(wanted: Wanted) -> list[Check]:
    role = wanted.plan.role
    name = role.rpartition("/")[2]
    bucket, _, prefix = wanted.source.location.removeprefix("s3://").partition("/")
    document = {"Version": "2012-10-17", "Statement": statements_of(wanted)}
    simulated = {
        "PolicySourceArn": role,
        "ActionNames": ["s3:GetObject"],
        "ResourceArns": [f"arn:aws:s3:::{bucket}/{prefix}*"],
    }
    update = f"aws iam update-assume-role-policy --role-name {name} --policy-document file://trust.json"
    return [
        trust_check(role, "sagemaker.amazonaws.com", update),
        Check(
            f"role {name} reads {wanted.source.location}",
            Call("iam", "simulate_principal_policy", simulated),
            lambda answer: "" if _allowed(answer) else "s3:GetObject is not allowed",
            cure=f"aws iam put-role-policy --role-name {name} --policy-name models --policy-document "
            f"'{json.dumps(document, separators=(',', ':'))}'",
            needed=False,
            absent="",
        ),
    ]


def _missing(names: Sequence[str], answer: Any) -> str:
    known = {each.get("AlarmName") for each in answer.get("MetricAlarms", []) + answer.get("CompositeAlarms", [])}
    lost = [name for name in names if name not in known]
    return f"there is no alarm {', '.join(lost)}" if lost else ""


def _allowed(answer: Any) -> bool:
    return all(each.get("EvalDecision") == "allowed" for each in answer.get("EvaluationResults", []))


def statements_of(wanted: Wanted) -> list[dict[str, Any]]:
    """Return the least policy: read the model, pull the image, write logs and metrics."""
    plan = wanted.plan
    bucket, _, prefix = wanted.source.location.removeprefix("s3://").partition("/")
    folder = prefix if prefix.endswith("/") else prefix.rpartition("/")[0]  # an archive is in the folder of its digest
    parent = prefix if plan.multi_model or not wanted.source.folder else f"{folder.rstrip('/').rpartition('/')[0]}/"
    repository = re.match(r"(\d+)\.dkr\.ecr\.([\w-]+)\.amazonaws\.com/([^:@]+)", plan.image)
    ecr = "arn:aws:ecr:{1}:{0}:repository/{2}".format(*repository.groups()) if repository else "*"

    logs = ("logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents")
    pull = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
    below = {"StringLike": {"s3:prefix": [f"{parent}*"]}}
    metrics = {"StringEquals": {"cloudwatch:namespace": ["/aws/sagemaker/Endpoints", "AWS/SageMaker"]}}
    statements = [
        allow(["s3:GetObject"], f"arn:aws:s3:::{bucket}/{parent}*"),
        allow(["s3:ListBucket"], f"arn:aws:s3:::{bucket}", Condition=below),
        allow(pull, ecr),
        allow(["ecr:GetAuthorizationToken"], "*"),
        allow(logs, f"arn:aws:logs:*:{wanted.account}:log-group:/aws/sagemaker/*"),
        allow(["cloudwatch:PutMetricData"], "*", Condition=metrics),
    ]
    if plan.answers:
        answers = plan.answers.removeprefix("s3://").partition("/")[0]
        actions = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
        statements += [
            allow(actions, f"arn:aws:s3:::{answers}/*"),
            allow(["s3:ListBucket"], f"arn:aws:s3:::{answers}"),
        ]
    if plan.capture:
        place, _, below_capture = plan.capture.removeprefix("s3://").partition("/")
        statements.append(allow(["s3:PutObject"], f"arn:aws:s3:::{place}/{below_capture}*"))
    return statements
