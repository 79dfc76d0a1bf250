"""Input file for `aws lambda create-function`, with computed memory and timeout."""

from __future__ import annotations

import re
from typing import Any

from remora.traffic.releases import HUNDRED, Release
from remora_deploy.deploy.aws_lambda import ALIAS, routing
from remora_deploy.manifests import releases
from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import Facts

_ROLE = "arn:aws:iam::000000000000:role/ROLE"
_NAME = re.compile(r"[A-Za-z0-9-_]{1,64}")
_ONE_PROCESSOR_MB = 1769
_MOST_MB = 10240
_LONGEST_S = 900
_LEAST_S = 30


def render(facts: Facts) -> str:
    """Return the YAML. Raises ValueError for GPUs and for more memory than a function can have."""
    choices = facts.choices
    choices.check()
    if facts.gpu:
        raise ValueError("Lambda has no GPUs: set the instance groups to KIND_CPU, or choose another platform")
    if facts.memory > _MOST_MB:
        raise ValueError(f"the models need {facts.memory} MiB, and a function has at most {_MOST_MB}")
    if not _NAME.fullmatch(facts.name):
        raise ValueError(f"{facts.name}: a function's name has at most 64 letters, digits, hyphens and underscores")
    model, rows = facts.busiest, max(facts.busiest.max_batch_size, 1)
    reasons = {
        "Role": "Yours: it reads the models from S3 and writes logs.",
        "MemorySize": f"The process had {facts.memory_mib} MiB with all models loaded; at least one whole processor "
        f"({_ONE_PROCESSOR_MB} MB).",
        "Timeout": f"Loading took {facts.load_s:.2f} s on the machine that wrote this; a load of more than 10 s is "
        "repeated in the first invocation and counts here.",
        "Environment": f"An environment answers one request at a time. Two batches of {rows} for each of "
        f"{model.instances} instances of '{model.name}' never meet in one: send rows together.",
    }
    if choices.release is not None:
        return _alias(facts, choices.release)
    return document(function(facts), reasons, "aws lambda create-function --cli-input-yaml file://THIS")


def _alias(facts: Facts, release: Release) -> str:
    """Return the arguments of UpdateAlias. Raises ValueError for more than two versions."""
    version, weight = releases.the_canary(release, "Lambda")
    shares = {f"LAMBDA_VERSION_OF_{version}": weight / HUNDRED} if version else {}
    found = {"FunctionName": facts.name, "Name": ALIAS, **routing(f"LAMBDA_VERSION_OF_{release.stable}", shares)}
    reasons = {
        "FunctionVersion": "Lambda numbers the versions of a function itself: aws lambda list-versions-by-function "
        f"--function-name {facts.name}",
    }
    return document(found, reasons, f"aws lambda update-alias --cli-input-yaml file://THIS\n{releases.notes(release)}")


def function(facts: Facts) -> dict[str, Any]:
    """Return the arguments of CreateFunction."""
    remote = "://" in facts.location
    found: dict[str, Any] = {
        "FunctionName": facts.name,
        "PackageType": "Image",
        "Code": {"ImageUri": facts.image},
        "Role": facts.choices.service_account or _ROLE,
        "MemorySize": max(_ONE_PROCESSOR_MB, facts.memory),
        "Timeout": min(max(_LEAST_S, 2 * facts.patience_s), _LONGEST_S),
        "TracingConfig": {"Mode": "Active"},
    }
    if remote:
        found["Environment"] = {"Variables": {"REMORA_MODEL_REPOSITORY": facts.location}}
        found["EphemeralStorage"] = {"Size": min(max(512, 2 * facts.memory), _MOST_MB)}
    return found
