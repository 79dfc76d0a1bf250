"""Parts of deployments to AWS: calls through boto3, checks, roles and log streams."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remora.system.install_advice import install_command
from remora_deploy.deploy.plan import GONE, Call, CallError, Check, Kind, Read, RefusedError, State, Step, find

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"NoSuchEntity|NotFound|NoSuchBucket|NoSuchKey|^404$|RepositoryNotFound|ImageNotFound|Could not find", "missing"),
    (r"LimitExceeded|QuotaExceeded|ServiceQuota|InsufficientCapacity", "quota"),
    (r"AccessDenied|Unauthorized|Forbidden|^403$|InvalidClientToken|ExpiredToken|SignatureDoes|Authori[sz]", "denied"),
    (r"AlreadyExist|EntityExists|Conflict(?!ing)|already exist", "exists"),
    (r"Throttl|TooManyRequests|ResourceInUse|currently in the following state|Cannot update in-progress", "busy"),
    (r"ServiceUnavailable|InternalFailure|InternalError|ServiceException", "unreachable"),
)
_POLICY = "remora"
_STREAMS = 2
_MOST_CHARACTERS = 600
_MOST_RETAINED = 8
"""Statements, within the size limit of a role's policy."""
_EXISTS: frozenset[Kind] = frozenset({"exists"})
_ECR = re.compile(r"\d+\.dkr\.ecr\.[\w-]+\.amazonaws\.com(?:\.cn)?")
_ASSUMED = re.compile(r"assume.*role|role.*assume|cannot be assumed", re.IGNORECASE)
"""Texts about a role that is too new to be assumed."""


EXTRA = "deploy-sagemaker"
"""Extra of remora with boto3."""


class AwsCalls:
    """Makes calls of AWS as ``client(target).operation(**arguments)``. Raises CallError."""

    def __init__(self, region: str | None) -> None:
        try:
            import boto3  # imported here because only this command needs it and it takes 0.2 s
        except ImportError:
            raise RefusedError(f"needs boto3: {install_command(EXTRA)}") from None
        from botocore.config import Config

        self._session = boto3.Session(region_name=region)
        self._config = Config(retries={"mode": "standard", "max_attempts": 4}, read_timeout=900)
        self._clients: dict[str, Any] = {}

    @property
    def session(self) -> Any:
        """The session of boto3."""
        return self._session

    @property
    def region(self) -> str:
        """The configured region, or ""."""
        return self._session.region_name or ""

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    def login(self, host: str) -> tuple[str, str] | None:
        """Return the login of a registry of ECR, None for any other."""
        if _ECR.fullmatch(host) is None:
            return None
        data = self(Call("ecr", "get_authorization_token", {}))["authorizationData"][0]
        user, _, password = base64.b64decode(data["authorizationToken"]).decode().partition(":")
        return user, password

    def environ(self) -> Mapping[str, str]:
        """Return the variables of the session's credentials, for uploads."""
        found = self._session.get_credentials()
        variables = {key: os.environ[key] for key in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3") if key in os.environ}
        if self.region:
            variables["AWS_REGION"] = self.region
        if found is None:
            return variables
        keys = found.get_frozen_credentials()
        variables |= {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
        return {**variables, "AWS_SESSION_TOKEN": keys.token} if keys.token else variables

    def __call__(self, call: Call) -> Any:
        """Make a call (see `Connection`)."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            client = self._clients.get(call.target)
            if client is None:
                client = self._clients[call.target] = self._session.client(call.target, config=self._config)
            answer = _pages(client, call)
        except (BotoCoreError, ClientError, ResponseParserError) as error:
            raise error_of(error) from error
        return _plain(answer)


def _pages(client: Any, call: Call) -> Any:
    """Return the answer of a call; of a list all its pages."""
    if call.operation.startswith("list_") and client.can_paginate(call.operation):
        return client.get_paginator(call.operation).paginate(**call.arguments).build_full_result()
    return getattr(client, call.operation)(**call.arguments)


def error_of(error: Any) -> CallError:
    """Convert an error of botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("Error", {})
        return CallError(_kind_of(found), _line(found.get("Message") or error), str(found.get("Code", "")))
    refused = any(word in str(error) for word in ("redential", "oken", "region"))
    return CallError("denied" if refused else "unreachable", _line(error))


def _line(text: object) -> str:
    """Return a text in one line of limited length, because a proxy's answer may be a page."""
    return " ".join(str(text).split())[:_MOST_CHARACTERS]


def _kind_of(error: dict[str, Any]) -> Kind:
    """Return an error's kind by its code, then its text: SageMaker has one code for most."""
    code, text = str(error.get("Code", "")), str(error.get("Message", ""))
    for tried in (code, text):
        for pattern, kind in _KINDS:
            if re.search(pattern, tried):
                return "busy" if kind == "denied" and _ASSUMED.search(text) else kind
    return "busy" if _ASSUMED.search(text) else "invalid"


def _plain(answer: Any) -> Any:
    """Return an answer with the bodies of streams read."""
    if not isinstance(answer, dict):
        return answer
    return {key: value.read() if hasattr(value, "read") else value for key, value in answer.items()}


def account_checks(region: str) -> tuple[Check, ...]:
    """Return the checks of credentials and region."""
    return (
        Check(
            "credentials",
            Call("sts", "get_caller_identity", {}),
            cure="aws configure, or aws sso login; then aws sts get-caller-identity",
            keep="account",
        ),
        Check(
            f"region {region or '(none)'}",
            Call("local", "echo", {"value": region}),
            judge=lambda answer: "" if answer else "no region is configured",
            cure="pass --region, such as --region eu-west-1, or aws configure set region eu-west-1",
        ),
    )


def bucket_check(url: str, region: str) -> Check:
    """Return the check that a bucket exists and is in the region of the service."""
    bucket = url.removeprefix("s3://").partition("/")[0]

    def judge(answer: Any) -> str:
        where = answer.get("LocationConstraint") or "us-east-1"
        where = "eu-west-1" if where == "EU" else where  # the name of old buckets
        return f"it is in {where}, and the service in {region}" if region and where != region else ""

    return Check(
        f"bucket {bucket}",
        Call("s3", "get_bucket_location", {"Bucket": bucket}),
        judge,
        cure=f"aws s3 mb s3://{bucket} --region {region or 'REGION'}, or name another bucket",
        absent="it does not exist",
    )


def trust_check(role: str, service: str, cure: str = "") -> Check:
    """Return the check that a role trusts a service."""
    name = role.rpartition("/")[2]

    def judge(answer: Any) -> str:
        trusted = service in json.dumps(find(answer, "Role.AssumeRolePolicyDocument", {}))
        return "" if trusted else f"its trust policy does not name {service}"

    omit = "omit --role, so that a role with the least policy is created"
    call = Call("iam", "get_role", {"RoleName": name})
    return Check(f"role {name}", call, judge, cure=f"{omit}{cure and f', or {cure}'}")


def trust_of(service: str, account: str) -> dict[str, Any]:
    """Return the trust policy of a role for a service, limited to the account."""
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": service},
        "Action": "sts:AssumeRole",
        "Condition": {"StringEquals": {"aws:SourceAccount": account}},
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def allow(actions: Sequence[str], resource: str, **more: Any) -> dict[str, Any]:
    """Return a statement of a policy."""
    return {"Effect": "Allow", "Action": list(actions), "Resource": resource, **more}


def role_reads(role: str) -> tuple[Read, ...]:
    """Return the reads of a role and its policy, as ``role`` and ``policy``."""
    policy = {"RoleName": role, "PolicyName": _POLICY}
    return (
        Read("role", lambda _: Call("iam", "get_role", {"RoleName": role}), needed=False),
        Read("policy", lambda _: Call("iam", "get_role_policy", policy), needed=False),
    )


def role_steps(
    role: str, trust: Mapping[str, Any], statements: Sequence[Any], state: State, unused: Callable[[State], bool]
) -> list[Step]:
    """Return the steps that create a role or extend its policy; ``unused`` ones are undone.

    Statements of earlier deployments about S3 remain, because the version before must be readable for a rollback.
    """
    before = find(state, "policy.PolicyDocument")
    earlier = [each for each in find(state, "policy.PolicyDocument.Statement", []) if each not in statements]
    retained = [each for each in earlier if any(action.startswith("s3:") for action in each["Action"])]
    document = {"Version": "2012-10-17", "Statement": [*statements, *retained[:_MOST_RETAINED]]}
    named = {"RoleName": role, "PolicyName": _POLICY}
    put = Call("iam", "put_role_policy", {**named, "PolicyDocument": json.dumps(document)})
    if state["role"] is None:
        created = {"RoleName": role, "AssumeRolePolicyDocument": json.dumps(trust)}
        delete = tuple(delete_role_steps(role))
        return [
            Step("role", Call("iam", "create_role", created), accepts=_EXISTS, undo=delete, undo_if=unused),
            Step("role", put),
        ]
    if all(each in find(state, "policy.PolicyDocument.Statement", []) for each in statements):
        return []
    back = Call("iam", "put_role_policy", {**named, "PolicyDocument": json.dumps(before)})
    return [Step("role", put, undo=(Step("role", back),) if before else ())]


def delete_role_steps(role: str) -> list[Step]:
    """Return the steps that delete such a role."""
    policy = {"RoleName": role, "PolicyName": _POLICY}
    return [
        Step("clean", Call("iam", "delete_role_policy", policy), accepts=GONE),
        Step("clean", Call("iam", "delete_role", {"RoleName": role}), accepts=GONE),
    ]


def streams_read(group: str) -> Read:
    """Return the read of a log group's newest streams, as ``streams``."""
    streams = {"logGroupName": group, "orderBy": "LastEventTime", "descending": True, "limit": _STREAMS}
    return Read("streams", lambda _: Call("logs", "describe_log_streams", streams), needed=False)


def log_calls(group: str, state: State, lines: int) -> list[Call]:
    """Return the reads of the newest streams, the newest last."""
    shared = {"logGroupName": group, "limit": lines, "startFromHead": False}
    names = [each["logStreamName"] for each in find(state, "streams.logStreams", [])]
    return [Call("logs", "get_log_events", {**shared, "logStreamName": name}) for name in reversed(names)]


def log_text(answer: Any) -> str:
    """Return the messages of a stream."""
    return "\n".join(str(event.get("message", "")) for event in answer.get("events", []))


def region_flag(region: str) -> str:
    """Return the flag of a region for a command line, "" for the configured one."""
    return f" --region {region}" if region else ""


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags that identify the account and region."""
    parser.add_argument("--region", default=None, help="AWS region (default: the configured one)")


def connect(options: argparse.Namespace, calls: type[AwsCalls] = AwsCalls) -> AwsCalls:
    """Return the connection, and complete the region. Raises RefusedError without the SDK."""
    connection = calls(options.region)
    options.region = connection.region
    return connection
