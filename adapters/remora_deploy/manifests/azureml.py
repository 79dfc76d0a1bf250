"""Manifest of an Azure ML managed online deployment, with computed probes and limits."""

from __future__ import annotations

import math
import re

from remora.traffic.releases import Release
from remora_deploy.deploy.azureml_documents import check_mirror
from remora_deploy.manifests import releases
from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import Facts

_PERIOD_S = 10
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{2,31}")


def render(facts: Facts) -> str:
    """Return the YAML for version 2 of Azure's CLI.

    Raises ValueError for an invalid endpoint name.
    """
    if not _NAME.fullmatch(facts.name):
        raise ValueError(
            f"{facts.name}: an endpoint's name has 3 to 32 letters, digits and hyphens, the first a letter"
        )
    facts.choices.check()
    release = facts.choices.release
    if release is None:
        return _deployment(facts, "blue", f"{facts.name}@latest")
    parts = [_endpoint(facts, release)]
    copied = [release.shadow.version] if release.shadow is not None else []
    for version in dict.fromkeys((*releases.weights(release), *copied)):
        parts.append(_deployment(facts, _name(version), f"{facts.name}:{version}"))
    return "---\n".join(parts)


def _name(version: int) -> str:
    return f"version-{version}"


def _endpoint(facts: Facts, release: Release) -> str:
    """Return the endpoint with the shares of its deployments.

    Raises ValueError for shares that Azure ML refuses.
    """
    shares = {_name(version): share for version, share in releases.whole_percents(release).items()}
    shadow, copies = release.shadow, {}
    if shadow is not None:
        percents = releases.whole_percent("the shadow", shadow.weight)
        check_mirror(percents, shared=bool(release.arms))
        copies = {_name(shadow.version): percents}
    found = {
        "$schema": "https://azuremlschemas.azureedge.net/latest/managedOnlineEndpoint.schema.json",
        "name": facts.name,
        "auth_mode": "key",
        "traffic": shares,
        "mirror_traffic": copies or None,
    }
    reasons = {
        "traffic": "Create the deployments below first, without traffic.",
        "mirror_traffic": "Azure ML drops the answers to copies.",
    }
    header = "az ml online-endpoint update --file THIS"
    return document(found, reasons, f"{header}\n{releases.notes(release, copies=True)}")


def _deployment(facts: Facts, name: str, model: str) -> str:
    busiest = facts.busiest
    tries = math.ceil(facts.patience_s / _PERIOD_S)
    instance = facts.choices.instance or ("Standard_NC4as_T4_v3" if facts.gpu else "Standard_F4s_v2")
    required = 'environment_variables:\n  # Not ready while the GPU is idle.\n  REMORA_REQUIRE_GPU: "true"\n'
    return f"""\
$schema: https://azuremlschemas.azureedge.net/latest/managedOnlineDeployment.schema.json
name: {name}
endpoint_name: {facts.name}
model: azureml:{model}
environment:
  name: remora
  image: {facts.image}
  inference_config:
    # Liveness and readiness differ: one route for both restarts a deployment that is slow to load.
    liveness_route: {{port: 5001, path: /livez}}
    readiness_route: {{port: 5001, path: /readyz}}
    # "/" lets clients append /v2/models/NAME/infer to the scoring URI; /score is for a script or the one model.
    scoring_route: {{port: 5001, path: /}}
instance_type: {instance}
instance_count: {facts.replicas(1, 1)[0]}
{required if facts.gpu else ""}\
request_settings:
  # 5000 unless set, which is too short for a first request.
  request_timeout_ms: 60000
  # Two batches of {max(busiest.max_batch_size, 1)} for each of {busiest.instances} instances of '{busiest.name}'; \
1 unless set, which never fills a batch.
  max_concurrent_requests_per_instance: {facts.concurrency}
liveness_probe:
  initial_delay: 10
  period: 10
  timeout: 2
  failure_threshold: 30
readiness_probe:
  initial_delay: 10
  period: {_PERIOD_S}
  timeout: 2
  # Loading took {facts.load_s:.2f} s on the machine that wrote this: {facts.patience_s} s until something is wrong.
  failure_threshold: {tries}
"""
