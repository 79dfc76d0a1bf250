"""Releases as JSON values, with the counts of their answers."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from remora.models.served_model import ServedModel
from remora.traffic.releases import Release
from remora_tools.rollout.routing import Router
from remora_tools.rollout.shadowing import Shadowing


def release_document(
    release: Release, router: Router, ready: Container[int], primary: ServedModel | None
) -> dict[str, Any]:
    """Return a release with the counts of its router as JSON values.

    ``ready`` has the versions that serve; ``primary`` is the newest of them.
    """
    counts = router.tally.rows()
    return {
        "stage": release.stage,
        "stable": release.stable,
        "sticky": release.sticky,
        "log": release.logged,
        "arms": [
            {
                "alias": arm.alias,
                "version": arm.version,
                "weight": arm.weight / 100,
                "ready": arm.version in ready,
                **counts.get(arm.version, {}),
            }
            for arm in release.shares()
        ],
        "shadow": _shadow_document(release, router.shadowing, primary),
        "aliases": dict(release.aliases),
        "rejected": list(release.rejected),
        "automatic": release.automatic,
        "steps": [step / 100 for step in release.steps],
        "rules": release.rules._asdict(),
        "slow_limit_ms": router.tally.limit_ns / 1e6,
        "since_ms": release.since_ms,
        "events": [event._asdict() for event in release.events],
    }


def _shadow_document(
    release: Release, shadowing: Shadowing | None, primary: ServedModel | None
) -> dict[str, Any] | None:
    """Return the shadow of a release as JSON values, None without one.

    Without ``shadowing`` the server's options do not define its name.
    """
    if release.shadow is None:
        return None
    shadow = release.shadow
    shown = shadow._asdict() | {"weight": shadow.weight / 100, "title": shadow.title}
    if shadowing is None:
        return shown | {"warning": "the shadow gets no copies: the server's options do not define its name"}
    warning = _warning(release, shadowing, primary)
    return shown | shadowing.document() | ({"warning": warning} if warning else {})


def _warning(release: Release, shadowing: Shadowing, primary: ServedModel | None) -> str:
    """Return which requests of a model the shadow does not get, "" if it gets all kinds."""
    if primary is None or release.shadow is None:
        return ""
    if refusal := shadowing.refusal(primary):
        return refusal
    arms = {arm.version for arm in release.arms}
    if primary.config.HasField("sequence_batching") and release.shadow.is_version and release.shadow.version in arms:
        return "the shadow gets no sequences, because clients begin sequences at the same version"
    if primary.generation is not None:
        return "the shadow gets no requests of OpenAI's routes"
    return ""
