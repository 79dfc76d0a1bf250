"""Input files for AWS's command line, with the calls of `remora deploy sagemaker`."""

from __future__ import annotations

from collections.abc import Mapping

from remora.traffic.releases import CANARY, Release
from remora_deploy.deploy.plan import Call
from remora_deploy.deploy.sagemaker_calls import CANARY as VARIANT_OF_CANARY
from remora_deploy.deploy.sagemaker_calls import (
    Plan,
    calls_of,
    endpoint_call,
    model_call,
    release_call,
    scaling_of,
)
from remora_deploy.manifests import releases
from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import Facts
from remora_deploy.pod import FULL_PERCENT, load_target

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
    if facts.choices.release is not None:
        return _release(facts, facts.choices.release, reasons)
    calls = (*calls_of(plan), *scaling_of(plan))
    return "---\n".join(document(call.arguments, reasons, _header(call)) for call in calls)


def _release(facts: Facts, release: Release, reasons: Mapping[str, str]) -> str:
    """Return the calls that create the models and divide the requests among variants."""
    shadow = release.shadow
    versions = {*releases.weights(release), *([shadow.version] if shadow is not None else [])}
    plans = {version: plan_of(releases.facts_of(facts, version)) for version in sorted(versions)}
    arms = [(_variant_name(arm.alias), plans[arm.version], arm.weight / 100) for arm in release.arms]
    copies = None if shadow is None else (plans[shadow.version], shadow.weight / 100)
    config = release_call(plans[release.stable], arms, copies)
    models = [model_call(plan) for plan in plans.values()]
    endpoint = endpoint_call(plans[release.stable], config.arguments["EndpointConfigName"], exists=True, instances=1)
    notes = releases.notes(release, copies=True)
    headers = [*map(_header, models), f"{_header(config)}\n{notes}", _header(endpoint)]
    calls = zip((*models, config, endpoint), headers, strict=True)
    return "---\n".join(document(call.arguments, reasons, header) for call, header in calls)


def _variant_name(alias: str) -> str:
    """Return the variant of an arm, as `remora deploy` names the canary's."""
    return VARIANT_OF_CANARY if alias == CANARY else alias.replace("_", "-")


def plan_of(facts: Facts) -> Plan:
    """Return the plan that `remora deploy sagemaker` would apply."""
    kind, sizes = ("ml.g5", _GPUS) if facts.gpu else ("ml.c6i", _CPUS)
    size = next((name for name, gib in sizes.items() if gib * _GIB >= facts.memory), list(sizes)[-1])
    facts.choices.check()
    least, most = facts.replicas(1, _MOST)
    return Plan(
        facts.name,
        facts.image,
        facts.location,
        facts.choices.service_account or _ROLE,
        instance=facts.choices.instance or f"{kind}.{size}",
        least=least,
        most=most,
        target=float(load_target(facts.concurrency)),
        startup_s=min(facts.patience_s, _LONGEST_S),
        download_s=min(facts.download_s, _LONGEST_S),
    )


def _header(call: Call) -> str:
    return f"aws {call.target} {call.operation.replace('_', '-')} --cli-input-yaml file://THIS"


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
        "ModelDataDownloadTimeoutInSeconds": f"For {facts.weights_mib} MiB at a tenth of S3's usual speed.",
        "RoutingStrategy": "A batch keeps an instance busy for longer: the next request goes to the idlest.",
        "TargetValue": (
            f"Two batches of {max(busiest.max_batch_size, 1)} for each of {busiest.instances} instances of "
            f"'{busiest.name}' are {facts.concurrency} at a time; scaling begins at {FULL_PERCENT} percent of it."
        ),
    }
