"""Releases of models: commands, declarations and judgement.

Invariant: the routes change before the versions do, so that no request reaches a version without a weight, and a
version is unloaded only after requests stopped going to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from remora.api.models import (
    CANARY_MEMBERS,
    SHADOW_MEMBERS,
    ModelTable,
    ReleaseStore,
    declared_release,
    flag_of,
    missing_version,
    occasion,
    plan_of,
    shadow_of,
    text_of,
    unstored_rollback,
    version_of,
)
from remora.api.storage import name_of
from remora.calls import ReleaseShare
from remora.errors import InternalError, InvalidArgumentError, NotFoundError, RemoraError
from remora.model_files import RELEASE_FILE
from remora.system.clock import Clock
from remora.traffic import releases
from remora.traffic.releases import CANARY, RUNNING, SETTLED, Release, Shadow
from remora_tools.rollout.documents import release_document
from remora_tools.rollout.judgement import WAIT, Rate, Verdict, judge
from remora_tools.rollout.routing import Router, Tally
from remora_tools.rollout.shadow_targets import ShadowSettings, make_shadowing, target_of
from remora_tools.rollout.shadowing import Shadowing

_log = logging.getLogger("remora.models")

RELEASE = "for a release"
_PARAMETERS: Mapping[str, frozenset[str]] = {
    "start": CANARY_MEMBERS | {"version", "alias", "reason"},
    "weight": frozenset(("weight", "alias", "reason")),
    "promote": frozenset(("alias", "reason")),
    "rollback": frozenset(("alias", "reason")),
    "alias": frozenset(("alias", "version")),
    "shadow": SHADOW_MEMBERS,
    "end": frozenset(("serve_latest",)),
}
ACTIONS = tuple(_PARAMETERS)


class Models(Protocol):
    """Loads of models, as releases use them."""

    table: ModelTable

    def load(self, key: str) -> None:
        """Bring a model to its desired versions. Raises RemoraError."""

    def available(self, key: str) -> list[int]:
        """Return the versions that have files in the model's repository. Raises RemoraError."""

    def is_sent(self, key: str) -> bool:
        """Return True if a client sent the model's configuration or files."""


class _Live(NamedTuple):
    """A release with the router that applies it."""

    release: Release
    router: Router


class Releases:
    """Releases of all models of an engine. Thread-safe.

    Args:
        models: loads and unloads the versions.
        clock: the engine's.
        store: keeps the releases.
        shadows: servers, functions and log of shadows; None without.

    Raises InternalError if the store cannot be read.
    """

    def __init__(self, models: Models, clock: Clock, store: ReleaseStore, shadows: ShadowSettings | None) -> None:
        self._models = models
        self._table = models.table
        self._clock = clock
        self._store = store
        self._shadows = shadows or ShadowSettings()
        self._commands = threading.RLock()  # held for a whole command with its loads
        self._lock = threading.RLock()  # held for a change of the state; loads may take it
        self._live: dict[str, _Live] = {}
        self._by_policy: dict[str, list[int]] = {}  # by the latest load
        self._declaring: set[str] = set()  # with a file at the latest load
        self._unsaved = ""
        self._judged: set[str] = set()
        for key, release in store.read().items():
            self._route(key, release)

    def close(self) -> None:
        """Store what could not be stored before, and end the copies to shadows."""
        self._save_again()
        for live in self._live.values():
            if live.router.shadowing is not None:
                live.router.shadowing.close()

    @property
    def stored_at(self) -> str:
        """The file of the releases, "" without one."""
        return str(self._store.path or "")

    # -- for loads ----------------------------------------------------------------------------------------------------

    def select(self, key: str, by_policy: list[int], available: list[int]) -> list[int]:
        """Return the versions to load: those of the version policy and those of the release."""
        live = self._live.get(key)
        if live is None:
            return by_policy
        self._by_policy[key] = by_policy
        return live.release.select(by_policy, available)

    def declare(self, key: str, text: bytes, available: list[int]) -> None:
        """Begin the release that a model's file declares, unless it has begun before.

        Raises InvalidArgumentError.
        """
        digest = blake2b(text, digest_size=16).hexdigest()
        with self._lock:
            self._declaring.add(key)
            live = self._live.get(key)
            if live is not None and live.release.declared == digest:
                return
            release = declared_release(text, digest, self._clock.wall_ms())
            missing = sorted(release.versions().difference(available))
            if missing:
                raise InvalidArgumentError(missing_version(RELEASE_FILE, missing[0], available))
            if live is not None:
                release = releases.declared_after(release, live.release)
            _log.info("model '%s' has a declared release: %s", key, _summary(release))
            self._put(key, release, forced=True)  # without the state the file declares it again
            if self._unsaved:
                _log.warning(
                    "the declared release of model '%s' is not stored: if the server is killed before it is stored, "
                    "the next start begins the release again, also after a rollback",
                    key,
                )

    def failed(self, key: str, reasons: Mapping[int, str]) -> bool:
        """Roll back the arms whose versions cannot be loaded.

        Return True if the model can serve without them.
        """
        with self._lock:
            live = self._live.get(key)
            if live is None or live.release.stable in reasons:
                return False
            release, now_ms = live.release, self._clock.wall_ms()
            broken = [arm for arm in release.arms if arm.version in reasons]
            for arm in broken:
                reason = f"it cannot be loaded: {reasons[arm.version]}"
                release = releases.rollback(release, now_ms, alias=arm.alias, reason=reason)
                _log.error("release of model '%s': version %d is rolled back: %s", key, arm.version, reason)
            if release.shadow is not None and release.shadow.is_version and release.shadow.version in reasons:
                reason = f"it cannot be loaded: {reasons[release.shadow.version]}"
                release = releases.end_shadow(release, now_ms, reason)
                _log.error("release of model '%s': the shadow is ended: %s", key, reason)
            if release is live.release:
                return False
            self._put(key, release, forced=True)
            return True

    # -- commands -----------------------------------------------------------------------------------------------------

    def perform(self, name: str, action: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        """Perform an action, or none for "", and return the status.

        Raises InvalidArgumentError, NotFoundError, and the error of a load.
        """
        key = self._key(name)
        if not action:
            self.look(key)
            self._save_again()
            return self.status(key)
        if action not in _PARAMETERS:
            raise InvalidArgumentError(f"release action {action[:40]!r} is not known: there are {', '.join(ACTIONS)}")
        unknown = sorted(set(parameters) - _PARAMETERS[action])
        if unknown:
            allowed = ", ".join(sorted(_PARAMETERS[action])) or "none"
            raise InvalidArgumentError(f"release {action}: unknown member '{unknown[0][:40]}'; there are: {allowed}")
        try:
            self._change(key, action, parameters)
        except ValueError as error:
            raise InvalidArgumentError(f"release {action} of model '{name}': {error}") from error
        return self.status(key)

    def _key(self, name: str) -> str:
        keys = [key for key in (name, *self._table.keys_of(name)) if key in self._live or self._table.state(key)]
        if not keys:
            raise NotFoundError(f"release: model '{name}' is not served")
        return keys[0]

    def _change(self, key: str, action: str, parameters: Mapping[str, object]) -> None:
        now_ms = self._clock.wall_ms()
        reason = text_of(parameters, "reason") or "command"
        with self._commands:
            if action == "start":
                self._start(key, parameters, now_ms, reason)
            elif action == "end":
                self._end(key, serve_latest=flag_of(parameters, "serve_latest"))
            elif action == "shadow":
                self._shadow(key, parameters, now_ms)
            else:
                version = version_of(parameters, self._models.available(key)) if "version" in parameters else None
                with self._lock:  # because a load may roll an arm back meanwhile
                    release = self._changed(self._release(key), action, parameters, version, now_ms, reason)
                    self._put(key, release, forced=action == "rollback")
                if action != "weight":
                    self._load(key)

    @staticmethod
    def _changed(
        release: Release, action: str, parameters: Mapping[str, object], version: int | None, now_ms: int, reason: str
    ) -> Release:
        """Return the release after a change of weights or aliases. Raises ValueError."""
        chosen = text_of(parameters, "alias")
        alias = chosen or CANARY
        if action == "weight":
            weight = releases.parse_weight(parameters.get("weight"))
            return releases.set_weight(release, weight, now_ms, alias=alias, reason=reason)
        if action == "promote":
            return releases.promote(release, now_ms, alias=alias, reason=reason)
        if action == "rollback":
            return releases.rollback(release, now_ms, alias=chosen, reason=reason)
        return releases.set_alias(release, alias, version, now_ms)

    def _release(self, key: str) -> Release:
        """Return the release of a model, which may have none yet."""
        live = self._live.get(key)
        return live.release if live is not None else Release(self._serving_version(key))

    def _start(self, key: str, parameters: Mapping[str, object], now_ms: int, reason: str) -> None:
        if self._models.is_sent(key):
            raise ValueError("a client sent this model's configuration: versions come from the repository only")
        self._check_loaded(key)
        version = version_of(parameters, self._models.available(key))
        with self._lock:
            before = self._live.get(key)
            release = releases.start(
                self._release(key),
                version,
                releases.parse_weight(parameters.get("weight", 0)),
                now_ms,
                alias=text_of(parameters, "alias") or CANARY,
                reason=reason,
                **plan_of(parameters),
            )
            self._put(key, release)
        try:
            self._load(key)
        except RemoraError:
            self._restore(key, before)
            raise
        found = self._live[key].release
        if not any(arm.version == version for arm in found.arms):
            why = found.events[-1].reason
            self._restore(key, before)
            raise InvalidArgumentError(f"version {version} of model '{key}' is not released: {why}")

    def _shadow(self, key: str, parameters: Mapping[str, object], now_ms: int) -> None:
        """Begin or end the copies to a version."""
        shadow: Shadow | None = None
        if parameters.keys() & {"version", "model", "url"}:
            self._check_loaded(key)
            shadow = shadow_of(parameters, self._models.available(key))
            self._check_shadow(key, shadow)
        with self._lock:
            before = self._live.get(key)
            self._put(key, releases.set_shadow(self._release(key), shadow, now_ms))
        if shadow is None:
            self._load(key)
            return
        try:
            self._load(key)
        except RemoraError:
            self._restore(key, before)
            raise
        if self._live[key].release.shadow != shadow:
            why = self._live[key].release.events[-1].reason
            self._restore(key, before)
            raise InvalidArgumentError(f"{shadow.title} gets no copies of model '{key}': {why}")

    def _check_shadow(self, key: str, shadow: Shadow) -> None:
        """Raise ValueError or NotFoundError for a shadow that does not exist."""
        self._shadows.check(shadow)
        if shadow.model and not shadow.url:
            if name_of(key) == shadow.model:
                raise ValueError(f"model '{shadow.model}' is the model itself: name another version of it")
            self._table.resolve(shadow.model, shadow.version or -1)
        primary = self._table.newest(key)
        refusal = target_of(shadow, key, self._table, self._shadows, self._clock).refusal(primary)
        if refusal:
            raise ValueError(refusal)

    def _restore(self, key: str, before: _Live | None) -> None:
        """Return to the release before a command that failed, with its counts.

        Versions that a load has ended meanwhile stay ended.
        """
        if before is None:
            self._drop(key)
            return
        with self._lock:
            release, now_ms, reason = before.release, self._clock.wall_ms(), "it cannot be loaded"
            broken = set(self._live[key].release.rejected).difference(release.rejected)
            for arm in before.release.arms:
                if arm.version in broken:
                    release = releases.rollback(release, now_ms, alias=arm.alias, reason=reason)
            if release.shadow is not None and release.shadow.is_version and release.shadow.version in broken:
                release = releases.end_shadow(release, now_ms, reason)
            self._put(key, release, forced=True, before=before)

    def _is_unloaded(self, key: str) -> bool:
        state = self._table.state(key)
        return state is not None and state.is_unloaded

    def _check_loaded(self, key: str) -> None:
        if self._is_unloaded(key):
            raise ValueError("the model is unloaded: load it first")

    def _serving_version(self, key: str) -> int:
        newest = self._table.newest(key)
        if newest is None:
            raise NotFoundError(f"release: model '{key}' has no version that serves")
        return newest.version

    def _end(self, key: str, *, serve_latest: bool) -> None:
        """Forget the release: the version policy decides again.

        A version that was rolled back serves then only with ``serve_latest``.
        """
        live = self._live.get(key)
        if live is None:
            raise ValueError("the model has no release")
        if live.release.stage == SETTLED:
            self._declaring.discard(key)
            with suppress(RemoraError):  # the load that follows fails too, and that of a broken model must not end here
                self._load(key)  # because the file or the version policy may be others than at the last load
        if key in self._declaring:
            raise ValueError(f"{RELEASE_FILE} declares it and would begin it again: remove the file first")
        by_policy = self._by_policy.get(key) or self._models.available(key)
        releases.check_end(live.release, by_policy, serve_latest=serve_latest)
        self._drop(key)
        self._load(key)

    def _load(self, key: str) -> None:
        if self._is_unloaded(key):
            return  # the next load is of the versions of the release
        with occasion(RELEASE):
            self._models.load(key)

    # -- state --------------------------------------------------------------------------------------------------------

    def _put(self, key: str, release: Release, *, forced: bool = False, before: _Live | None = None) -> None:
        """Store a release and route by it.

        A step keeps its counts: those of the release ``before`` a failed command, else of the one in force.

        Raises InternalError if it cannot be stored, unless ``forced``; then it takes effect before it is stored,
        because a disk may be slow.
        """
        with self._lock:
            release = release._replace(slow_limit_ns=self._kept_limit_ns(key, release))
            stored = {**{each: live.release for each, live in self._live.items()}, key: release}
            if forced:
                self._route(key, release, before)
            self._save(stored, forced=forced)
            if not forced:
                self._route(key, release, before)

    def _kept_limit_ns(self, key: str, release: Release) -> int:
        """Return the latency limit to store with a step, 0 if the stable version's answers set one.

        A step without requests to the stable version goes on with the limit so far, also after a restart.
        """
        live = self._live.get(key)
        if live is None or live.release.stage != RUNNING or live.release.stable != release.stable:
            return 0
        return 0 if release.stable_weight else live.router.tally.limit_ns

    def _drop(self, key: str) -> None:
        with self._lock:
            rest = {each: live.release for each, live in self._live.items() if each != key}
            self._save(rest, forced=True)
            ended = self._live[key].router.shadowing if key in self._live else None
            self._live = {each: live for each, live in self._live.items() if each != key}
            self._table.route(key, None)
        if ended is not None:
            ended.close()

    def _save_again(self) -> None:
        with self._lock:
            if self._unsaved:
                self._save({key: live.release for key, live in self._live.items()}, forced=True)

    def _save(self, stored: Mapping[str, Release], *, forced: bool) -> None:
        try:
            self._store.write(stored)
            self._unsaved = ""
        except OSError as error:
            before = self._unsaved
            self._unsaved = (
                f"the state of releases cannot be written to '{self._store.path}': {error.strerror or error}"
            )
            if self._unsaved != before:
                _log.error("%s", self._unsaved)
            if not forced:
                hint = "nothing has changed; make room, or name another folder with --release-directory"
                raise InternalError(f"{self._unsaved}; {hint}") from error

    def _route(self, key: str, release: Release, before: _Live | None = None) -> None:
        live = self._live.get(key)
        counted = before or live
        step = release.since_ms, release.arms
        if counted is not None and (counted.release.since_ms, counted.release.arms) == step:
            tally = counted.router.tally
        else:
            tally = Tally(release.stable, _limit_ns(release))
        look = self._judge_soon(key) if release.automatic else _nothing
        shadowing = self._shadowing(key, release, live)
        router = Router(release, tally, self._clock.monotonic_ns, look, shadowing)
        self._live = {**self._live, key: _Live(release, router)}
        self._table.route(key, router)
        if live is not None and live.router.shadowing not in (None, shadowing):
            live.router.shadowing.close()

    def _shadowing(self, key: str, release: Release, live: _Live | None) -> Shadowing | None:
        """Return the runner of a release's copies, the same as before if the shadow is the same."""
        shadow = release.shadow
        if shadow is None:
            return None
        if live is not None and live.release.shadow == shadow and live.router.shadowing is not None:
            return live.router.shadowing
        try:
            return make_shadowing(shadow, key, self._table, self._shadows, self._clock)
        except ValueError as error:  # the release was stored by a server with other options
            _log.error("release of model '%s': the shadow gets no copies: %s", key, error)
            return None

    # -- judgement ----------------------------------------------------------------------------------------------------

    def _judge_soon(self, key: str) -> Callable[[], None]:
        def look() -> None:
            if key not in self._judged and self._verdict(key).action != WAIT:
                self._judged.add(key)
                try:
                    threading.Thread(target=self._judge_now, args=(key,), name="remora release", daemon=True).start()
                except RuntimeError:  # the process can have no more threads; the next answer leads here again
                    self._judged.discard(key)

        return look

    def _judge_now(self, key: str) -> None:
        try:
            self.look(key)
        except Exception:  # the release continues and the next answer leads here again
            _log.exception("the judgement of the release of model '%s' failed", key)
        finally:
            self._judged.discard(key)

    def _verdict(self, key: str) -> Verdict:
        live = self._live.get(key)
        canary = live.release.canary if live is not None else None
        if live is None or canary is None:
            return Verdict(WAIT, "no canary is running")
        if self._is_unloaded(key):
            return Verdict(WAIT, "the model is unloaded")
        elapsed_s = max(self._clock.wall_ms() - live.release.since_ms, 0) / 1e3
        observed = live.router.tally.observed(canary.version)
        if not live.release.stable_weight:  # its last answers are those of sequences from before the step
            observed = observed._replace(stable_errors=Rate(), stable_slow=Rate())
        shadow, shadowing = live.release.shadow, live.router.shadowing
        if shadow is not None and shadowing is not None and shadow.is_version and shadow.version == canary.version:
            observed = observed._replace(differing=shadowing.rate)
        return judge(live.release.rules, observed, elapsed_s)

    def look(self, key: str) -> None:
        """Judge an automatic release and act on the verdict, unless a command is being carried out."""
        if not self._commands.acquire(blocking=False):
            return
        try:
            with self._lock:
                live = self._live.get(key)
                if live is None or not live.release.automatic:
                    return
                verdict = self._verdict(key)
                if verdict.action == WAIT:
                    return
                now_ms = self._clock.wall_ms()
                change = releases.advance if verdict.action == "promote" else _roll_back
                release = change(live.release, now_ms, verdict.reason)
                _log.warning("release of model '%s': %s: %s", key, release.events[-1].action, verdict.reason)
                self._put(key, release, forced=True)
            self._load(key)
        finally:
            self._commands.release()

    # -- status -------------------------------------------------------------------------------------------------------

    def status(self, key: str) -> dict[str, Any]:
        """Return the state of a model's release as JSON values."""
        live = self._live.get(key)
        if live is None:
            return {"model": key, "stage": "none", "stable": self._serving_version(key), "arms": []}
        document = release_document(live.release, live.router, self._table.serving(key), self._table.newest(key))
        return {
            "model": key,
            **document,
            "judgement": self._verdict(key).reason if live.release.automatic else "",
            "stored": str(self._store.path) if self._store.path is not None and not self._unsaved else "",
            "warning": self._unsaved or ("" if self._store.path else unstored_rollback(live.release)),
        }

    def shares(self) -> list[ReleaseShare]:
        """Return the weights and counts of all running releases, for the metrics."""
        found = []
        for key, (release, router) in sorted(self._live.items()):
            counts = router.tally.rows()
            for arm in release.shares():
                row = counts.get(arm.version, {})
                answers, errors = int(row.get("answers", 0)), int(row.get("errors", 0))
                weight = arm.weight / releases.HUNDRED
                found.append(ReleaseShare(key, arm.version, arm.alias, weight, answers, errors))
        return found


def _nothing() -> None:
    """Judge nothing, because people decide."""


def _limit_ns(release: Release) -> int:
    """Return the latency limit that a step begins with, 0 if answers set it."""
    return int(release.rules.slow_ms * 1e6) or release.slow_limit_ns


def _roll_back(release: Release, now_ms: int, reason: str) -> Release:
    return releases.rollback(release, now_ms, alias=CANARY, reason=reason)


def _summary(release: Release) -> str:
    arms = [f"{arm.alias} version {arm.version} with {releases.percent(arm.weight)}" for arm in release.arms]
    return ", ".join([f"stable version {release.stable}", *arms])
