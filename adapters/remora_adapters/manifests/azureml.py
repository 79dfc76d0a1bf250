"""Manifest of an Azure ML managed online deployment, with computed probes and limits."""

from __future__ import annotations

import math
import re

from remora_adapters.manifests.facts import Facts

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
    busiest = facts.busiest
    tries = math.ceil(facts.patience_s / _PERIOD_S)
    facts.choices.check()
    instance = facts.choices.instance or ("Standard_NC4as_T4_v3" if facts.gpu else "Standard_F4s_v2")
    required = 'environment_variables:\n  # Not ready while the GPU is idle.\n  REMORA_REQUIRE_GPU: "true"\n'
    return f"""\
$schema: https://azuremlschemas.azureedge.net/latest/managedOnlineDeployment.schema.json
name: blue
endpoint_name: {facts.name}
model: azureml:{facts.name}@latest
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
