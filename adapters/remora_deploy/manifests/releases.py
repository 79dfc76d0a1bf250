"""Release of a model in the terms of platforms. Pure.

Each version is a revision, deployment or variant of the platform.
"""

from __future__ import annotations

from typing import Any

from remora.traffic.releases import CANARY, HUNDRED, STABLE, Release, percent
from remora_deploy.deploy.shares import Shares
from remora_deploy.manifests.facts import Facts

_WHOLE = 100
"""Hundredths of a percent in the weights of platforms with whole percentages."""


def name_of(facts: Facts, version: int) -> str:
    """Return the name of the revision that serves a version."""
    return f"{facts.name}-v{version}"


def facts_of(facts: Facts, version: int) -> Facts:
    """Return the facts of the service that serves one version.

    Raises ValueError for a location without a version.
    """
    if VERSION not in facts.location:
        raise ValueError(
            f"--models {facts.location}: expected {VERSION} in the location, such as s3://bucket/digits/{VERSION}/: "
            "each revision of the platform serves one version"
        )
    return facts._replace(location=facts.location.replace(VERSION, str(version)))


VERSION = "{version}"
"""Placeholder for the number of a version in the location of the models."""


def weights(release: Release) -> dict[int, int]:
    """Return the weights of the versions that answer, in hundredths of a percent, stable first."""
    found = {release.stable: HUNDRED - sum(arm.weight for arm in release.arms)}
    for arm in release.arms:  # two of them may have one version in a state that an earlier server stored
        found[arm.version] = found.get(arm.version, 0) + arm.weight
    return found


def whole_percent(name: str, weight: int) -> int:
    """Return a weight as a percentage. Raises ValueError for a fraction."""
    if weight % _WHOLE:
        raise ValueError(f"{name} has {percent(weight)}: this platform takes whole percentages")
    return weight // _WHOLE


def whole_percents(release: Release) -> dict[int, int]:
    """Return the percentage of each version that answers. Raises ValueError for fractions."""
    for arm in release.arms:
        whole_percent(arm.alias, arm.weight)
    return {version: weight // _WHOLE for version, weight in weights(release).items()}


def shares(facts: Facts, release: Release) -> Shares:
    """Return the percentage of each revision. Raises ValueError for fractions."""
    return {name_of(facts, version): share for version, share in whole_percents(release).items()}


def targets(facts: Facts, release: Release) -> list[dict[str, Any]]:
    """Return the targets of Knative's and Cloud Run's traffic, each with its alias as the tag.

    Raises ValueError for fractions.
    """
    return [
        {"revisionName": name_of(facts, version), "percent": share, "tag": release.alias_of(version).lower()}
        for version, share in whole_percents(release).items()
    ]


def newest(release: Release) -> int:
    """Return the version of the last revision: the canary, another arm, or the stable one."""
    return (
        release.canary.version
        if release.canary
        else next((arm.version for arm in reversed(release.arms)), release.stable)
    )


def the_canary(release: Release, platform: str) -> tuple[int, int]:
    """Return version and weight of the only version beside the stable one, (0, 0) without one.

    Raises ValueError for several.
    """
    if len(release.arms) > 1:
        names = ", ".join(arm.alias for arm in release.arms)
        raise ValueError(f"{platform} divides traffic between two versions, and the release has {STABLE}, {names}")
    return next(((arm.version, arm.weight) for arm in release.arms), (0, 0))


def notes(release: Release, *, copies: bool = False) -> str:
    """Return the comment on how the platform differs from a server of remora.

    ``copies`` is True for platforms with shadows.
    """
    lines = ["The platform chooses the version of each request at random: no client stays with one version."]
    if release.shadow is not None and not copies:
        lines.append(
            f"The shadow, version {release.shadow.version}, is left out: this platform does not copy requests. "
            "`remora release shadow` copies them inside a server."
        )
    if release.automatic:
        lines.append(f"The platform does not judge the {CANARY}: its weight stays until it is changed.")
    return "\n".join(lines)
