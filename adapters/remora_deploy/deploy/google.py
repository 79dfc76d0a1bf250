"""Parts of deployments to Google Cloud: checks, operations, log entries and credentials."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from remora.system.install_advice import install_command
from remora_deploy.deploy.images import Needs, image_check
from remora_deploy.deploy.plan import Call, CallError, Check, Kept, Progress, RefusedError, Step, advice, find
from remora_deploy.deploy.rest import RestCalls, rest
from remora_deploy.deploy.uploads import Source

_PROJECTS = "cloudresourcemanager.googleapis.com"
_USAGE = "serviceusage.googleapis.com"
_LOGGING = "logging.googleapis.com"
_STORAGE = "storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class Api(NamedTuple):
    """API of a deployment, with the permissions, the quota's metric and the needed amount."""

    name: str
    permissions: Sequence[str]
    metric: str
    needed: int = 1


def checks(project: str, region: str, api: Api, image: str, needs: Needs, source: Source, account: str) -> list[Check]:
    """Return the checks of project, bucket, image, and the account's right to read."""
    found = [*_project_checks(project, region, api), _bucket_check(source.location), image_check(image, needs)]
    return [*found, _reader_check(source.location, account)] if account else found


def _project_checks(project: str, region: str, api: Api) -> list[Check]:
    """Return the checks of credentials, API, rights and quota of a project."""
    _, permissions, metric, needed = api

    def rights(answer: Any) -> str:
        lost = [each for each in permissions if each not in find(answer, "permissions", [])]
        return f"denied: {', '.join(lost)}" if lost else ""

    def quota(answer: Any) -> str:
        for each in find(answer, "metrics", []):
            if metric not in str(each.get("metric", "")):
                continue
            for limit in each.get("consumerQuotaLimits", []):
                for bucket in limit.get("quotaBuckets", []):
                    where = find(bucket, "dimensions.region", region)
                    if where == region and 0 <= int(bucket.get("effectiveLimit", -1)) < needed:
                        return f"the quota {metric} is {bucket['effectiveLimit']} in {region}, and {needed} are needed"
        return ""

    metrics = f"/v1beta1/projects/{project}/services/{api.name}/consumerQuotaMetrics"
    return [
        Check(
            "credentials and rights",
            rest("POST", _PROJECTS, f"/v3/projects/{project}:testIamPermissions", {"permissions": list(permissions)}),
            rights,
            cure=f"gcloud auth application-default login; then gcloud projects add-iam-policy-binding {project} "
            "--member user:YOU --role ROLE with these permissions",
            absent=f"there is no project {project}",
        ),
        Check(
            f"API {api.name}",
            rest("GET", _USAGE, f"/v1/projects/{project}/services/{api.name}"),
            lambda answer: "" if answer.get("state") == "ENABLED" else "it is not enabled",
            cure=f"gcloud services enable {api.name} --project {project}",
        ),
        Check(
            f"quota in {region}",
            rest("GET", _USAGE, metrics),
            quota,
            cure=f"gcloud beta quotas preferences create --service {api.name} --project {project} --quota-id ... "
            f"--preferred-value {needed} --dimensions region={region}",
            needed=False,
            absent="",
        ),
    ]


def _bucket_check(url: str) -> Check:
    """Return the check that a bucket exists."""
    bucket = url.removeprefix("gs://").partition("/")[0]
    return Check(
        f"bucket {bucket}",
        rest("GET", _STORAGE, f"/storage/v1/b/{bucket}"),
        cure=f"gcloud storage buckets create gs://{bucket}",
    )


def _reader_check(url: str, account: str) -> Check:
    """Return the check that a service account may read a bucket, by the bucket's own policy."""
    bucket = url.removeprefix("gs://").partition("/")[0]
    member = f"serviceAccount:{account}"

    def judge(answer: Any) -> str:
        roles = [each.get("role", "") for each in answer.get("bindings", []) if member in each.get("members", [])]
        reads = any(word in role for role in roles for word in ("object", "storage.admin", "legacy"))
        return "" if reads else f"no role of the bucket names {account}"

    return Check(
        f"bucket {bucket} is readable by {account}",
        rest("GET", _STORAGE, f"/storage/v1/b/{bucket}/iam"),
        judge,
        cure=f"gcloud storage buckets add-iam-policy-binding gs://{bucket} --member {member} "
        "--role roles/storage.objectViewer",
        needed=False,
        absent="",
    )


def log_call(project: str, condition: str, lines: int) -> Call:
    """Return the read of the newest log entries."""
    body = {
        "resourceNames": [f"projects/{project}"],
        "filter": condition,
        "orderBy": "timestamp desc",
        "pageSize": min(lines, 1000),
    }
    return rest("POST", _LOGGING, "/v2/entries:list", body)


def log_text(answer: Any) -> str:
    """Return the text of log entries, the newest last."""
    lines = []
    for entry in reversed(answer.get("entries", []) if isinstance(answer, dict) else []):
        text = entry.get("textPayload") or find(entry, "jsonPayload.message", "")
        lines.append(str(text).rstrip("\n"))
    return "\n".join(lines)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags that identify the project and region."""
    parser.add_argument("--project", required=True, metavar="ID", help="project")
    parser.add_argument("--region", required=True, metavar="REGION", help="region, such as europe-west4")


def add_size(parser: argparse.ArgumentParser, unit: str, least: int, most: int) -> None:
    """Add the flags of the limits, the account and the share of a version."""
    add = parser.add_argument
    add("--min", type=int, metavar="N", help=f"least {unit} (default: as what serves, {least} for a new service)")
    add("--max", type=int, metavar="N", help=f"most {unit} (default: as what serves, {most} for a new service)")
    add("--service-account", default="", metavar="EMAIL", help=f"account of the {unit} (default: the platform's)")
    add("--traffic", type=int, default=100, metavar="PERCENT", help="share of the new version beside the current one")


def next_commands(platform: str, name: str, project: str, region: str, cost: str) -> list[tuple[str, str]]:
    """Return the commands that follow a deployment."""
    return advice(f"{platform} {name} --project {project} --region {region}", cost)


def operation_step(host: str, version: str, name: str, phase: str = "deploy", limit_s: float = 3600.0) -> Step:
    """Return the step that waits for the operation ``name`` and keeps its result."""

    def until(answer: Any) -> Progress:
        if not answer.get("done"):
            return Progress(False, "in progress")
        error = answer.get("error") or {}
        return Progress(failure=str(error.get("message", "")) if error else "", text="done")

    call = rest("GET", host, f"/{version}/{Kept(name, 'name')}")
    return Step(phase, call, until, keep=f"{name}-result", every_s=5.0, limit_s=limit_s)


def connect(options: argparse.Namespace) -> RestCalls:
    """Return the connection. Raises RefusedError without the SDK or credentials."""
    try:
        auth = import_module("google.auth")
        transport = import_module("google.auth.transport.requests")
        id_token = import_module("google.oauth2.id_token")
    except ImportError:
        raise RefusedError(f"needs google-auth: {install_command('deploy-google')}") from None
    try:
        credentials, _ = auth.default(scopes=[_SCOPE])
    except auth.exceptions.DefaultCredentialsError:
        raise RefusedError("no credentials of Google Cloud: gcloud auth application-default login") from None
    request = transport.Request()

    def token(audience: str) -> str:
        try:
            if audience:
                own = getattr(credentials, "id_token", None)
                return str(own or id_token.fetch_id_token(request, audience))
            if not credentials.valid:
                credentials.refresh(request)
            return str(credentials.token)
        except auth.exceptions.GoogleAuthError as error:
            raise CallError("denied", f"{error}: gcloud auth application-default login") from error

    def registry(host: str) -> tuple[str, str] | None:
        known = host.endswith("-docker.pkg.dev") or host == "gcr.io" or host.endswith(".gcr.io")
        return ("oauth2accesstoken", token("")) if known else None

    return RestCalls(token, registry)
