"""Shares of the traffic among the versions of a service, in percent by the version's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.traffic.releases import Release, percent

Shares = Mapping[str, int]


def check_share(percent: int) -> None:
    """Raise ValueError for a share that no platform has."""
    if not 1 <= percent <= 100:
        raise ValueError(f"--traffic={percent}: expected 1 to 100 percent")


def flags_of(release: Release) -> dict[str, int]:
    """Return the share (``traffic``) or the copies (``shadow``) of a new version, in percent.

    Raises ValueError for a release that one deployment cannot express.
    """
    if len(release.arms) + (release.shadow is not None) != 1:
        raise ValueError("--release: one deployment adds one version: expected a canary or a shadow, and not several")
    weight = release.shadow.weight if release.shadow is not None else release.arms[0].weight
    if weight % 100:
        raise ValueError(f"--release: {percent(weight)}: expected a whole percentage")
    return {"shadow" if release.shadow is not None else "traffic": weight // 100}


def check_replicas(least: int, most: int) -> None:
    """Raise ValueError for limits of the replicas that no platform has."""
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"--min={least} --max={most}: the maximum must be at least 1 and the minimum")


def limits_of(requested: tuple[int | None, int | None], now: tuple[int, int]) -> tuple[int, int]:
    """Return the requested limits of the replicas, or those of what serves."""
    least, most = requested
    if least is None:
        least = now[0] if most is None else min(now[0], most)
    return least, max(now[1], least) if most is None else most


def main_of(shares: Shares) -> str:
    """Return the version with most of the traffic, or ""."""
    return max(shares, key=lambda name: shares[name]) if shares else ""


def split(stable: str, version: str, percent: int) -> dict[str, int]:
    """Return the shares with ``percent`` for a version beside the stable one."""
    return {version: 100} if percent == 100 else {stable: 100 - percent, version: percent}


def shares_of(targets: Sequence[Any], key: str, latest: str = "") -> dict[str, int]:
    """Return the shares of targets that name their revision by ``key``, or mean the latest one."""
    shares: dict[str, int] = {}
    for each in targets:
        name = str(each.get(key) or latest)
        if each.get("percent"):
            shares[name] = shares.get(name, 0) + int(each["percent"])
    return shares


def tagged(shares: Shares, key: str, version: str, tag: str, **more: str) -> list[dict[str, Any]]:
    """Return the targets of shares, with a tag for the version that may have no share yet."""
    named = shares if version in shares else {**shares, version: 0}
    targets: list[dict[str, Any]] = [{**more, key: name, "percent": share} for name, share in named.items()]
    return [{**each, "tag": tag} if each[key] == version else each for each in targets]


def shown(shares: Shares) -> str:
    """Return the shares as text."""
    return ", ".join(f"{name} {share} percent" for name, share in shares.items()) or "none"
