"""Versions of a SageMaker endpoint: shares, running counts, and the way back. Pure.

A version is a model's digest. The endpoint's tags retain the history; the place of a version in it is the digest of the
configuration by which it served alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora_deploy.deploy.plan import Call, CallError, State, Step, find
from remora_deploy.deploy.sagemaker_calls import VARIANT, named_config
from remora_deploy.deploy.versions import History, alone, history_of, texts_of

_PREFIX = "remora:"
_VARIANTS = ("ProductionVariants", "ShadowProductionVariants")
_SETTINGS = (
    "AsyncInferenceConfig",
    "DataCaptureConfig",
    "EnableNetworkIsolation",
    "ExecutionRoleArn",
    "ExplainerConfig",
    "KmsKeyId",
    "MetricsConfig",
    "VpcConfig",
)


def history(state: State) -> History:
    """Return what the endpoint's tags retain."""
    return history_of({str(each.get("Key")): str(each.get("Value")) for each in find(state, "tags.Tags", [])}, _PREFIX)


def tags_of(found: History) -> list[dict[str, str]]:
    """Return the tags that retain a history."""
    return [{"Key": key, "Value": value} for key, value in texts_of(found, _PREFIX).items()]


def record_steps(state: State, found: History) -> list[Step]:
    """Return the step that writes a history, if the tags have another one."""
    if found == history(state):
        return []
    arguments = {"ResourceArn": find(state, "endpoint.EndpointArn"), "Tags": tags_of(found)}
    return [Step("traffic", Call("sagemaker", "add_tags", arguments))]


def version_of(name: str, model: object) -> str:
    """Return the version of a model's name."""
    return str(model).removeprefix(f"{name}-")


def counts(state: State) -> dict[str, int]:
    """Return the desired instance count of each variant that runs."""
    running = [each for key in _VARIANTS for each in find(state, f"endpoint.{key}", [])]
    found = {str(each.get("VariantName")): each for each in running}
    return {name: int(each.get("DesiredInstanceCount") or each.get("CurrentInstanceCount") or 0)
            for name, each in found.items()}  # fmt: skip


def main_count(state: State) -> int:
    """Return the running instances of the variant that scaling knows."""
    return counts(state).get(VARIANT, 0)


def running_config(state: State) -> dict[str, Any]:
    """Return the configuration that serves, with the counts that run."""
    found = find(state, "config", {})
    variants = {key: with_counts(found[key], counts(state)) for key in _VARIANTS if found.get(key)}
    return {**_settings_of(found), **variants}


def _settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a configuration beside name, variants and tags."""
    return {key: config[key] for key in _SETTINGS if config.get(key)}


def with_counts(variants: list[Mapping[str, Any]], running: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return variants with the counts that run, where variants have instances."""
    return [
        {**each, "InitialInstanceCount": running.get(str(each.get("VariantName"))) or each["InitialInstanceCount"]}
        if "InitialInstanceCount" in each
        else dict(each)
        for each in variants
    ]


def shares(name: str, state: State) -> dict[str, int]:
    """Return the percentage of each version that answers, by the endpoint's weights."""
    configured = {str(each.get("VariantName")): each for each in find(state, "config.ProductionVariants", [])}
    weights: dict[str, float] = {}
    for each in find(state, "endpoint.ProductionVariants", []) or configured.values():
        variant = configured.get(str(each.get("VariantName")), {})
        weight = each.get("CurrentWeight", variant.get("InitialVariantWeight", 1.0))
        version = version_of(name, variant.get("ModelName", each.get("VariantName")))
        weights[version] = weights.get(version, 0.0) + float(weight)
    whole = sum(weights.values())
    return {version: round(100 * weight / whole) for version, weight in weights.items() if weight} if whole else {}


def copies(name: str, state: State) -> list[str]:
    """Return the versions that get copies of the requests."""
    return [version_of(name, each.get("ModelName")) for each in find(state, "config.ShadowProductionVariants", [])]


def place_of(name: str, config: object) -> str:
    """Return the place of a version that a configuration serves alone."""
    return str(config).removeprefix(f"{name}-")


def observed(name: str, state: State) -> History:
    """Return the history with what serves now."""
    if state["endpoint"] is None:
        return History()
    place = "" if copies(name, state) else place_of(name, find(state, "endpoint.EndpointConfigName", ""))
    return history(state).observed(shares(name, state), main_count(state), place)


def target(name: str, state: State, configs: list[str]) -> str:
    """Return the version that a rollback returns to. Raises RefusedError."""
    found = observed(name, state)
    models = {version_of(name, each.get("ModelName")) for each in find(state, "models.Models", [])}
    usable = {
        each.version for each in found.served if each.version in models and f"{name}-{each.place}" in configs
    } | set(shares(name, state))
    return found.target(name, shares(name, state), trial=bool(copies(name, state)), existing=usable)


def config_back(name: str, state: State, version: str) -> Call:
    """Return the call that creates the configuration by which a version serves alone again.

    It has as many instances as run now, or as the version had, whichever are more.
    """
    running = without_shadows(running_config(state))
    shared = len(shares(name, state)) > 1 or bool(copies(name, state))
    for each in running.get("ProductionVariants", []):
        if shared and version_of(name, each.get("ModelName")) == version:
            return named_config(name, {**running, "ProductionVariants": [{**each, "InitialVariantWeight": 1.0}]})
    found = find(state, "previous", {})
    before = found.get("ProductionVariants", [])
    least = max(main_count(state), observed(name, state).entry(version).instances)
    wanted = {str(each.get("VariantName")): max(each.get("InitialInstanceCount", 0), least) for each in before}
    return named_config(name, {**_settings_of(found), "ProductionVariants": with_counts(before, wanted)})


def is_alone(name: str, state: State) -> str:
    """Return the version that answers all requests without copies to another one, or ""."""
    return "" if copies(name, state) else alone(shares(name, state))


def without_shadows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without its shadows."""
    return {key: value for key, value in config.items() if key != "ShadowProductionVariants"}


def answer_by(variant: str, answer: Any) -> bytes:
    """Return the body of an invocation. Raises CallError if another variant answered."""
    by = answer.get("InvokedProductionVariant", variant)
    if by != variant:
        raise CallError("failed", f"the variant {by} answered, not {variant}")
    return bytes(answer.get("Body", b""))
