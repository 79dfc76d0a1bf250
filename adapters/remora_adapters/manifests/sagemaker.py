"""Input files for AWS's command line, with the calls of `remora deploy sagemaker`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from remora_adapters.manifests.facts import Facts
from remora_adapters.sagemaker.deploying import ApiCall, Plan, calls_of, scaling_of

_ROLE = "arn:aws:iam::000000000000:role/ROLE"
_MOST = 4
_LONGEST_S = 3600
_GIB = 1024
_CPUS = {"xlarge": 8, "2xlarge": 16, "4xlarge": 32, "8xlarge": 64, "16xlarge": 128, "32xlarge": 256}
_GPUS = {"xlarge": 16, "2xlarge": 32, "4xlarge": 64, "8xlarge": 128, "16xlarge": 256}
"""Memory of the sizes of ml.c6i and ml.g5, in GiB."""


def render(facts: Facts) -> str:
    """Return a YAML document for each call, for ``--cli-input-yaml``.

    Raises ValueError for a name or a location that the platform would refuse.
    """
    plan = plan_of(facts)
    plan.check()
    reasons = _reasons(facts, plan)
    return "---\n".join(_document(call, reasons) for call in (*calls_of(plan, exists=False), *scaling_of(plan)))


def plan_of(facts: Facts) -> Plan:
    """Return the plan that `remora deploy sagemaker` would apply."""
    kind, sizes = ("ml.g5", _GPUS) if facts.gpu else ("ml.c6i", _CPUS)
    size = next((name for name, gib in sizes.items() if gib * _GIB >= facts.memory), list(sizes)[-1])
    return Plan(
        facts.name,
        facts.image,
        facts.location,
        _ROLE,
        instance=f"{kind}.{size}",
        most=_MOST,
        target=float(max(1, facts.concurrency * 7 // 10)),
        startup_s=min(facts.patience_s, _LONGEST_S),
    )


def _reasons(facts: Facts, plan: Plan) -> Mapping[str, str]:
    """Return the reason for each computed value by field name."""
    busiest = facts.busiest
    gpu = ", with a GPU, which a model is configured for" if facts.gpu else ""
    return {
        "ModelName": "Ends with a digest of the plan: another plan creates another model and configuration.",
        "ExecutionRoleArn": "Yours: it reads the models from S3 and the image from ECR.",
        "InstanceType": f"The smallest with {facts.memory} MiB, twice what the process had here{gpu}.",
        "InferenceAmiVersion": "Its driver is for CUDA 13, which current runtimes are built for.",
        "ContainerStartupHealthCheckTimeoutInSeconds": (
            f"Loading took {facts.load_s:.2f} s on the machine that wrote this: {plan.startup_s} s until something is "
            "wrong."
        ),
        "ModelDataDownloadTimeoutInSeconds": "As long again for the models to come from S3.",
        "RoutingStrategy": "A batch keeps an instance busy for longer: the next request goes to the idlest.",
        "TargetValue": (
            f"Two batches of {max(busiest.max_batch_size, 1)} for each of {busiest.instances} instances of "
            f"'{busiest.name}' are {facts.concurrency} at a time; scaling begins at 70 percent of it."
        ),
    }


def _document(call: ApiCall, reasons: Mapping[str, str]) -> str:
    header = f"# aws {call.service} {call.operation.replace('_', '-')} --cli-input-yaml file://THIS\n"
    return header + "".join(f"{line}\n" for line in _lines(call.arguments, reasons))


def _lines(fields: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield a mapping as YAML blocks, with scalars as JSON because YAML reads them the same."""
    for key, value in fields.items():
        if key in reasons:
            yield f"# {reasons[key]}"
        if isinstance(value, dict) and value:
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(value, reasons))
        elif isinstance(value, list):
            yield f"{key}:"
            for each in value:
                yield "  -"
                yield from (f"    {line}" for line in _lines(each, reasons))
        else:
            yield f"{key}: {json.dumps(value)}"
