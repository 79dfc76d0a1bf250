"""Members of release commands and of ``release.yaml``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.errors import InvalidArgumentError, NotFoundError, RemoraError
from remora.traffic import releases
from remora.traffic.releases import Release, Rules, Shadow

CANARY_MEMBERS = frozenset(("weight", "steps", "sticky", "automatic", "rules", "log"))
_DECLARED = CANARY_MEMBERS | {"stable", "canary", "aliases", "shadow"}


def declared_release(text: bytes, digest: str, now_ms: int) -> Release:
    """Return the release of a file ``release.yaml``. Raises InvalidArgumentError."""
    from remora.config.documents import read_yaml  # imported here, because few models declare a release
    from remora.config.schema_errors import SchemaError

    try:
        document, _ = read_yaml(text.decode())
        if not isinstance(document, dict) or "stable" not in document:
            raise ValueError("expected a mapping with at least 'stable'")
        unknown = sorted(str(name) for name in document.keys() - _DECLARED)
        if unknown:
            raise ValueError(f"unknown member '{unknown[0][:40]}'; there are: {', '.join(sorted(_DECLARED))}")
        release = Release(number_of(document["stable"], "stable"), declared=digest)
        aliases = document.get("aliases") or {}
        if not isinstance(aliases, dict):
            raise ValueError("aliases: expected a mapping of names to versions")
        for alias, version in aliases.items():
            release = releases.set_alias(release, str(alias), number_of(version, str(alias)), now_ms)
        if "shadow" in document:
            if not isinstance(document["shadow"], dict):
                raise ValueError("shadow: expected a mapping with a version, model or url")
            release = releases.set_shadow(release, shadow_of(document["shadow"], None), now_ms)
        if "canary" not in document:
            idle = ", ".join(sorted(document.keys() & CANARY_MEMBERS))
            if idle:
                raise ValueError(f"{idle}: only with a canary; add 'canary' with its version, or leave {idle} out")
            return release
        weight = releases.parse_weight(document.get("weight", 0))
        canary = number_of(document["canary"], "canary")
        return releases.start(release, canary, weight, now_ms, reason="release.yaml", **plan_of(document))
    except (ValueError, RemoraError, SchemaError) as error:
        raise InvalidArgumentError(f"release.yaml: {error}") from error


def plan_of(members: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of `releases.start` that requests and files share. Raises ValueError."""
    steps, rules = members.get("steps", []), members.get("rules", {})
    if not isinstance(steps, list):
        raise ValueError("steps: expected a list of weights")
    if not isinstance(rules, dict):
        raise ValueError("rules: expected an object")
    automatic = flag_of(members, "automatic")
    judged = " and ".join(name for name, value in (("steps", steps), ("rules", rules)) if value)
    if judged and not automatic:
        why = "because people decide without it"
        raise ValueError(f'{judged}: only with "automatic": true, {why}; add it, or leave {judged} out')
    return {
        "logged": flag_of(members, "log"),
        "steps": tuple(map(releases.parse_weight, steps)),
        "sticky": text_of(members, "sticky") or releases.BY_REQUEST,
        "automatic": automatic,
        "rules": _rules(rules),
    }


SHADOW_MEMBERS = frozenset(("version", "weight", "tolerance", "top_k", "model", "url", "compare"))


def shadow_of(members: Mapping[str, object], available: list[int] | None) -> Shadow:
    """Return the shadow of a command, or of a file with None. Raises ValueError, NotFoundError."""
    unknown = sorted(str(name) for name in members.keys() - SHADOW_MEMBERS)
    if unknown:
        raise ValueError(f"shadow: unknown member '{unknown[0][:40]}'; there are: {', '.join(sorted(SHADOW_MEMBERS))}")
    model, url, compare = (text_of(members, name) for name in ("model", "url", "compare"))
    if (model or url) and "version" not in members:
        version = 0
    elif model or url or available is None:
        version = number_of(members.get("version"), "version")
    else:
        version = version_of(members, available)
    weight = releases.parse_weight(members.get("weight", 100))
    tolerance, top_k = members.get("tolerance", 0.0), members.get("top_k", 0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1e9:
        raise ValueError("tolerance: expected a number from 0 on")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 0 <= top_k < 1e6:
        raise ValueError("top_k: expected a whole number from 0 on")
    if compare and (tolerance or top_k):
        raise ValueError("compare: a function compares in place of tolerance and top_k")
    return Shadow(version, weight, float(tolerance), top_k, model, url, compare)


_LIMITS: Mapping[str, tuple[float, float]] = {
    "alpha": (1e-9, 0.5),
    "error_margin": (0.0, 0.5),
    "slow_margin": (0.0, 0.5),
    "slow_ms": (0.0, 1e9),
    "most_differing": (0.0, 1.0),
    "bake_s": (0.0, 1e9),
    "least": (1, 1e9),
}


def _rules(members: Mapping[Any, Any]) -> Rules:
    for name, value in members.items():
        if name not in _LIMITS:
            raise ValueError(f"rules: unknown member '{str(name)[:40]}'; there are: {', '.join(_LIMITS)}")
        low, high = _LIMITS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"rules: {name} is {value!r}: expected a number from {low:g} to {high:g}")
    return Rules()._replace(**{name: int(value) if name == "least" else value for name, value in members.items()})


def text_of(members: Mapping[str, object], name: str) -> str:
    """Return a text, "" for none. Raises ValueError."""
    value = members.get(name, "")
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError(f"{name}: expected a text of at most 1000 characters")
    return value


def unstored_rollback(release: Release) -> str:
    """Return a warning for a release that a restart forgets, "" without a rollback."""
    versions = ", ".join(map(str, release.rejected))
    return versions and (
        f"the rollback of version {versions} is kept in memory only, so that a restart of the server undoes it: "
        "name a folder for the state of releases with --release-directory"
    )


def flag_of(members: Mapping[str, object], name: str) -> bool:
    """Return a boolean, false if it is missing. Raises ValueError."""
    value = members.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false")
    return value


def number_of(value: object, name: str) -> int:
    """Return the number of a version. Raises ValueError."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name}: expected the number of a version, got {str(value)[:40]!r}")
    return value


def version_of(members: Mapping[str, object], available: list[int]) -> int:
    """Return the version of a command. Raises ValueError, NotFoundError."""
    if "version" not in members:
        raise ValueError("version: expected the number of a version")
    version = number_of(members["version"], "version")
    if version not in available:
        raise NotFoundError(missing_version("the release", version, available))
    return version


def missing_version(what: str, version: int, available: list[int]) -> str:
    """Return the error text for a version that the repository does not have."""
    there = ", ".join(map(str, available)) or "none"
    return f"{what} names version {version}, which the model's repository does not have: it has {there}"
