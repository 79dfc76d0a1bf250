"""Release of a model version: arms, weights, assignment of requests, and transitions. Pure.

A release is a value. Each transition takes the time and returns the next value or raises ValueError with the reason, so
that a stored release continues after a restart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

STABLE, CANARY, LATEST = "stable", "canary", "latest"
SHADOW = "shadow"
"""Name of the shadow where releases are written as text; no arm has it."""
RUNNING, SETTLED = "running", "settled"
BY_REQUEST = "request"
STICKY_HEADER, STICKY_PARAMETER = "header:", "parameter:"
HUNDRED = 10_000
"""Weights are hundredths of a percent."""
HISTORY = 20
_ADDED = frozenset(("slow_limit_ns",))
"""Fields that the stored form of an earlier version of remora lacks; they have defaults."""
_ROLLED_BACK = "roll back version "
"""Begin of the action of a rollback, before the versions."""
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")


class Rules(NamedTuple):
    """Rules of the automatic judgement.

    ``alpha`` bounds the probability of a wrong rollback, and that of a wrong promotion of a version that is worse than
    a margin allows. Margins are differences of rates. ``bake_s`` is the least duration of each step and ``least`` the
    least number of the canary's answers in it. ``slow_ms`` is the latency limit, 0 for one taken from the stable
    version. ``most_differing`` is the largest rate of differing answers of a shadow.
    """

    alpha: float = 0.05
    error_margin: float = 0.01
    slow_margin: float = 0.05
    slow_ms: float = 0.0
    most_differing: float = 0.01
    bake_s: float = 600.0
    least: int = 100


class Event(NamedTuple):
    """Transition of a release: wall time in ms, action, reason."""

    at_ms: int
    action: str
    reason: str


class Arm(NamedTuple):
    """Version that gets a part of the requests; ``weight`` is in hundredths of a percent."""

    alias: str
    version: int
    weight: int


class Shadow(NamedTuple):
    """What gets a copy of a share of the requests; its answers are compared and never sent.

    Attributes:
        version: version of the model, or of ``model`` or at ``url``, where 0 is the one that serves.
        weight: share in hundredths of a percent.
        tolerance, top_k: see `comparing.Comparison`.
        model: another model, "" for the same.
        url: name of another server, "" for this one.
        compare: name of a function that compares the answers in place of ``tolerance`` and ``top_k``, or "".
    """

    version: int
    weight: int
    tolerance: float = 0.0
    top_k: int = 0
    model: str = ""
    url: str = ""
    compare: str = ""

    @property
    def is_version(self) -> bool:
        """True for another version of the same model on this server."""
        return not (self.model or self.url)

    @property
    def title(self) -> str:
        """Description, such as ``version 3 of model 'm' at 'name'``."""
        parts = [f"version {self.version}"] if self.version or self.is_version else []
        parts += [f"model '{self.model}'"] if self.model else []
        text = " of ".join(parts)
        return f"{text or 'the model'} at '{self.url}'" if self.url else text


class Release(NamedTuple):
    """Release of a model.

    Attributes:
        stable: the version that gets all requests that no arm gets.
        arms: the other versions with a weight, in the order in which they divide the range of hashes.
        aliases: further names of versions, which get no share of the requests.
        rejected: versions that were rolled back; the version policy does not load them.
        sticky: what identifies a client: ``request`` (the request's id), ``header:NAME`` or ``parameter:NAME``.
        salt: makes two releases choose different clients.
        since_ms: wall time at which the current step began.
        steps: weights of the canary that follow when the judgement is good; the version is promoted after the last.
        automatic: True if the judgement promotes and rolls back.
        rules: of the judgement.
        shadow: the version that gets copies, or None.
        logged: True if the choice for each request is logged, for an analysis of an A/B test.
        declared: digest of the file that declared the release, "" for a command.
        slow_limit_ns: latency limit that a step without requests to the stable version has from the step before, 0 for
            none.
        events: the latest transitions, oldest first.
    """

    stable: int
    arms: tuple[Arm, ...] = ()
    aliases: Mapping[str, int] = {}
    rejected: tuple[int, ...] = ()
    sticky: str = BY_REQUEST
    salt: str = ""
    since_ms: int = 0
    steps: tuple[int, ...] = ()
    automatic: bool = False
    rules: Rules = Rules()
    shadow: Shadow | None = None
    logged: bool = False
    declared: str = ""
    slow_limit_ns: int = 0
    events: tuple[Event, ...] = ()

    @property
    def stage(self) -> str:
        """RUNNING while an arm exists, else SETTLED."""
        return RUNNING if self.arms else SETTLED

    @property
    def canary(self) -> Arm | None:
        """The arm that is judged, None without one."""
        return next((arm for arm in self.arms if arm.alias == CANARY), None)

    @property
    def stable_weight(self) -> int:
        """The rest of the weights, which the stable version has."""
        return HUNDRED - sum(arm.weight for arm in self.arms)

    def shares(self) -> list[Arm]:
        """Return the stable version, as an arm, and the arms."""
        return [Arm(STABLE, self.stable, self.stable_weight), *self.arms]

    def versions(self) -> set[int]:
        """Return the versions that must be loaded."""
        copies = {self.shadow.version} if self.shadow is not None and self.shadow.is_version else set()
        return {self.stable, *(arm.version for arm in self.arms), *self.aliases.values(), *copies}

    def version_of(self, alias: str) -> int | None:
        """Return the version of an alias other than LATEST, or None."""
        if alias == STABLE:
            return self.stable
        arm = next((arm.version for arm in self.arms if arm.alias == alias), None)
        return arm if arm is not None else self.aliases.get(alias)

    def alias_of(self, version: int) -> str:
        """Return the alias of the stable version or of an arm, "" for another version."""
        if version == self.stable:
            return STABLE
        return next((arm.alias for arm in self.arms if arm.version == version), "")

    def select(self, by_policy: Iterable[int], available: Iterable[int]) -> list[int]:
        """Return the versions to load, from those of the version policy and those that have files."""
        return sorted({*by_policy}.difference(self.rejected).union(self.versions()).intersection(available))


# -- assignment -------------------------------------------------------------------------------------------------------


def hash_of(salt: str, key: str) -> int:
    """Return the 64-bit hash of a client, which does not show its identity."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=salt.encode()[:64]).digest()
    return int.from_bytes(digest)


def bucket_of(salt: str, key: str) -> int:
    """Return the place of a client in the range of hashes, from 0 to `HUNDRED` - 1."""
    return hash_of(salt, key) * HUNDRED >> 64


def arm_of(arms: Sequence[Arm], bucket: int) -> Arm | None:
    """Return the arm of a place in the range, None for the stable version.

    A larger weight of the first arm moves clients only to that arm.
    """
    end = 0
    for arm in arms:
        end += arm.weight
        if bucket < end:
            return arm
    return None


# -- transitions ------------------------------------------------------------------------------------------------------


def start(
    release: Release,
    version: int,
    weight: int,
    now_ms: int,
    *,
    alias: str = CANARY,
    steps: tuple[int, ...] = (),
    sticky: str = BY_REQUEST,
    automatic: bool = False,
    rules: Rules | None = None,
    logged: bool = False,
    declared: str = "",
    reason: str = "",
) -> Release:
    """Begin to send a part of the requests to a version. Raises ValueError."""
    if any(arm.alias == alias for arm in release.arms):
        arm = next(arm for arm in release.arms if arm.alias == alias)
        raise ValueError(
            f"a release is running: {alias} is version {arm.version} with {percent(arm.weight)}; promote it, roll it "
            "back or change its weight"
        )
    if version == release.stable:
        raise ValueError(f"version {version} is stable already")
    other = next((arm.alias for arm in release.arms if arm.version == version), "")
    if other:  # answers are counted by version, so that the counts of both would be the sum
        raise ValueError(f"version {version} is the version of {other} already")
    check_alias(alias)
    if alias in (STABLE, LATEST, SHADOW):
        raise ValueError(f"'{alias}' cannot have a weight: choose another name for the arm")
    if automatic and alias != CANARY:
        raise ValueError(f"only '{CANARY}' is judged: '{alias}' cannot be automatic")
    arms = (*release.arms, Arm(alias, version, weight))
    _check_weights(arms)
    if any(later <= earlier for earlier, later in zip((weight, *steps), steps, strict=False)):
        raise ValueError("each step must have a larger weight than the one before")
    check_sticky(sticky)
    first = not release.arms
    began = release._replace(
        arms=arms,
        rejected=tuple(number for number in release.rejected if number != version),
        sticky=sticky if first else release.sticky,
        salt=f"{now_ms:x}" if first else release.salt,
        since_ms=now_ms,
        steps=steps if alias == CANARY else release.steps,
        automatic=automatic or release.automatic,
        rules=rules or Rules() if alias == CANARY else release.rules,  # another arm is not judged
        logged=logged or (release.logged and not first),
        declared=declared or release.declared,
    )
    return _with_event(began, now_ms, f"start {alias} version {version} with {percent(weight)}", reason)


def set_weight(release: Release, weight: int, now_ms: int, *, alias: str = CANARY, reason: str = "") -> Release:
    """Change the weight of an arm. Raises ValueError."""
    _arm(release, alias)
    arms = tuple(arm._replace(weight=weight) if arm.alias == alias else arm for arm in release.arms)
    _check_weights(arms)
    steps = tuple(step for step in release.steps if step > weight)
    changed = release._replace(arms=arms, since_ms=now_ms, steps=steps)
    return _with_event(changed, now_ms, f"{alias} has {percent(weight)}", reason)


def promote(release: Release, now_ms: int, *, alias: str = CANARY, reason: str = "") -> Release:
    """Make the version of an arm the stable one and end all arms. Raises ValueError."""
    version = _arm(release, alias).version
    shadow = release.shadow
    if shadow is not None and shadow.is_version and shadow.version == version:
        shadow = None
    ended = release._replace(stable=version, arms=(), steps=(), automatic=False, since_ms=now_ms, shadow=shadow)
    return _with_event(ended, now_ms, f"promote version {version}", reason)


def advance(release: Release, now_ms: int, reason: str) -> Release:
    """Take the canary's next step: its next weight, or the promotion."""
    if release.steps:
        return set_weight(release, release.steps[0], now_ms, reason=reason)
    return promote(release, now_ms, reason=reason)


def rollback(release: Release, now_ms: int, *, alias: str = "", reason: str = "") -> Release:
    """End one arm, or all without an ``alias``. Raises ValueError."""
    ended = [_arm(release, alias)] if alias else list(release.arms)
    if not ended:
        raise ValueError("no release is running")
    kept = tuple(arm for arm in release.arms if arm not in ended)
    versions = [arm.version for arm in ended]
    judged = any(arm.alias == CANARY for arm in kept)
    rejected = tuple(sorted({*release.rejected, *versions} - {release.stable, *(arm.version for arm in kept)}))
    settled = release._replace(
        arms=kept,
        rejected=rejected,
        steps=release.steps if judged else (),
        automatic=release.automatic and judged,
        since_ms=now_ms,
    )
    return _with_event(settled, now_ms, _ROLLED_BACK + ", ".join(map(str, versions)), reason)


def check_end(release: Release, by_policy: Iterable[int], *, serve_latest: bool) -> None:
    """Check that a release may be forgotten.

    It may not while it runs, or if a version that was rolled back would serve next. ``by_policy`` are the versions of
    the version policy; ``serve_latest`` lets any of them serve. Raises ValueError.
    """
    if release.stage == RUNNING:
        raise ValueError("a release is running: promote it or roll it back first")
    newest = max(by_policy, default=0)
    if newest in release.rejected and not serve_latest:
        why = _reason_of_rollback(release, newest)
        raise ValueError(
            f"version {newest} would serve, which was rolled back{f' ({why})' if why else ''}: keep the release, in "
            f"which version {release.stable} is stable, add a newer version, or let version {newest} serve with "
            '--serve-latest ("serve_latest": true)'
        )


def declared_after(release: Release, before: Release) -> Release:
    """Return the release of a changed file, with the rollbacks that it does not undo by name."""
    rejected = sorted({*before.rejected}.difference(release.versions()))
    return release._replace(rejected=tuple(rejected), events=(*before.events, *release.events)[-HISTORY:])


def _reason_of_rollback(release: Release, version: int) -> str:
    """Return the reason of a version's latest rollback, "" if it is no longer kept."""
    for event in reversed(release.events):
        if event.action.startswith(_ROLLED_BACK) and str(version) in event.action.removeprefix(_ROLLED_BACK).split(
            ", "
        ):
            return event.reason
    return ""


def set_shadow(release: Release, shadow: Shadow | None, now_ms: int) -> Release:
    """Send copies of requests to a version, or end that with None. Raises ValueError."""
    if shadow is None:
        if release.shadow is None:
            raise ValueError("there is no shadow")
        return _with_event(release._replace(shadow=None), now_ms, "end the shadow", "")
    if shadow.is_version and shadow.version == release.stable:
        raise ValueError(f"version {shadow.version} is stable: a shadow is another version")
    if not 0 < shadow.weight <= HUNDRED:
        raise ValueError(f"share of the shadow: expected above 0 to 100 percent, got {percent(shadow.weight)}")
    # A version that was rolled back stays so, because copies do not make it serve.
    return _with_event(release._replace(shadow=shadow), now_ms, f"copy {percent(shadow.weight)} to {shadow.title}", "")


def end_shadow(release: Release, now_ms: int, reason: str) -> Release:
    """End the copies because of a fault; the version policy does not load the version."""
    assert release.shadow is not None
    version = release.shadow.version
    kept = {release.stable, *(arm.version for arm in release.arms)}
    rejected = tuple(sorted({*release.rejected, version} - kept))
    return _with_event(release._replace(shadow=None, rejected=rejected), now_ms, "end the shadow", reason)


def set_alias(release: Release, alias: str, version: int | None, now_ms: int) -> Release:
    """Let a name stand for a version, or for none. Raises ValueError."""
    check_alias(alias)
    if alias in (LATEST, STABLE) or any(arm.alias == alias for arm in release.arms):
        raise ValueError(f"'{alias}' follows the release: choose another name")
    aliases = {name: number for name, number in release.aliases.items() if name != alias}
    if version is not None:
        aliases[alias] = version
    action = f"{alias} is version {version}" if version is not None else f"remove {alias}"
    return _with_event(release._replace(aliases=aliases), now_ms, action, "")


def _arm(release: Release, alias: str) -> Arm:
    arm = next((arm for arm in release.arms if arm.alias == alias), None)
    if arm is None:
        running = ", ".join(arm.alias for arm in release.arms)
        raise ValueError(f"there is no arm '{alias}': " + (f"there is {running}" if running else "no release runs"))
    return arm


def _with_event(release: Release, now_ms: int, action: str, reason: str) -> Release:
    return release._replace(events=(*release.events, Event(now_ms, action, reason))[-HISTORY:])


def _check_weights(arms: Sequence[Arm]) -> None:
    for arm in arms:
        if not 0 <= arm.weight <= HUNDRED:
            raise ValueError(f"weight of {arm.alias}: expected 0 to 100 percent, got {percent(arm.weight)}")
    total = sum(arm.weight for arm in arms)
    if total > HUNDRED:
        shares = " + ".join(f"{arm.alias} {percent(arm.weight)}" for arm in arms)
        raise ValueError(f"the weights exceed 100 percent: {shares} = {percent(total)}")


def check_alias(alias: str) -> None:
    """Raise ValueError for a text that is not an alias."""
    if not _ALIAS.fullmatch(alias):
        raise ValueError(f"'{alias[:40]}' is not an alias: expected a letter, then up to 31 letters, digits, _ and -")


def check_sticky(sticky: str) -> None:
    """Raise ValueError for a text that names no property of a request."""
    prefix = next((each for each in (STICKY_HEADER, STICKY_PARAMETER) if sticky.startswith(each)), "")
    if sticky != BY_REQUEST and not (prefix and _TOKEN.fullmatch(sticky[len(prefix) :])):
        raise ValueError(f"sticky '{sticky[:80]}': expected request, header:NAME or parameter:NAME")


# -- texts and documents ----------------------------------------------------------------------------------------------


def percent(weight: int) -> str:
    """Return a weight as text, such as ``12.5 %``."""
    return f"{weight / 100:g} %"


def parse_weight(value: object) -> int:
    """Return the weight of ``10``, ``"10"`` or ``"10%"``. Raises ValueError."""
    text = str(value).strip().removesuffix("%").strip()
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= 100:
        raise ValueError(f"weight {str(value)[:40]!r}: expected 0 to 100 percent, such as 10%")
    return round(number * 100)


def as_document(release: Release) -> dict[str, Any]:
    """Return the stored form of a release."""
    fields = release._asdict()
    fields["arms"] = [arm._asdict() for arm in release.arms]
    fields["events"] = [event._asdict() for event in release.events]
    fields["rules"] = release.rules._asdict()
    fields["shadow"] = release.shadow._asdict() if release.shadow is not None else None
    return {**fields, "aliases": dict(release.aliases), "rejected": list(release.rejected)}


def from_document(document: Any) -> Release:
    """Return the release of a stored form. Raises ValueError."""
    try:
        fields = {name: document[name] for name in Release._fields if name in document or name not in _ADDED}
        fields["arms"] = tuple(Arm(**row) for row in fields["arms"])
        fields["events"] = tuple(Event(**row) for row in fields["events"])
        fields["rules"] = Rules(**fields["rules"])
        fields["shadow"] = Shadow(**fields["shadow"]) if fields["shadow"] is not None else None
        fields |= {name: tuple(map(int, fields[name])) for name in ("rejected", "steps")}
        fields["aliases"] = {str(name): int(version) for name, version in fields["aliases"].items()}
        release = Release(**fields)
        if type(release.slow_limit_ns) is not int or release.slow_limit_ns < 0:
            raise TypeError(f"slow_limit_ns {release.slow_limit_ns!r:.40}")
        _check_weights(release.arms)
        check_sticky(release.sticky)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a stored release: {type(error).__name__} {error}") from None
    return release
