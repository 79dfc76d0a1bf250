"""What a service served before, and the version that a rollback returns to. Pure.

A platform retains a `History` where the service is (tags, labels, annotations, a description), reads it with the state
and writes it with the change of the traffic. The order in which versions were created decides nothing.

Invariant: a rollback returns to a version that served alone and was not taken back since it was deployed last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from remora_deploy.deploy.plan import RefusedError, State
from remora_deploy.deploy.shares import Shares, main_of

LIMIT = 6
"""Versions that are retained, so that a history fits into a label of 63 characters."""
_SEPARATOR = "_"
_COUNT = re.compile(r"x\d+$")
_ENTRY = re.compile(r"(?P<version>[^_.]*?)(?:x(?P<count>\d+))?(?:\.(?P<place>[^_.]+))?")


class Served(NamedTuple):
    """A version that served alone.

    ``instances`` is their number at the time, 0 where the platform sets it; ``place`` is the platform's
    object that served it, "" where the version names it.
    """

    version: str
    instances: int = 0
    place: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """Versions that served alone, the newest last and each once, and those that were taken back."""

    served: tuple[Served, ...] = ()
    taken_back: frozenset[str] = frozenset()

    @property
    def last(self) -> str:
        """The version that served alone last, or ""."""
        return self.served[-1].version if self.served else ""

    def entry(self, version: str) -> Served:
        """Return what is known of a version."""
        return next((each for each in self.served if each.version == version), Served(version))

    def observed(self, shares: Shares, count: int = 0, place: str = "") -> History:
        """Return the history with the version that serves alone now, if one does.

        It is computed before a change, so that a service that was changed by other programs is retained too. A count
        or place replaces the known one.
        """
        version = alone(shares)
        if not version:
            return self
        known = self.entry(version)
        entry = Served(version, count or known.instances, place or known.place)
        if self.last == version:
            return replace(self, served=(*self.served[:-1], entry))
        return self._with(entry)

    def deployed(self, version: str, count: int = 0, place: str = "") -> History:
        """Return the history after a deployment of a version to all requests."""
        found = self._with(Served(version, count, place))
        return replace(found, taken_back=found.taken_back - {version})

    def rolled_back(self, target: str, versions: Iterable[str]) -> History:
        """Return the history after a rollback that took ``versions`` away."""
        found = self._with(self.entry(target))
        gone = {each for each in versions if each != target}
        known = {each.version for each in found.served}
        return replace(found, taken_back=(found.taken_back | gone) & known - {target})

    def target(self, name: str, shares: Shares, *, trial: bool = False, existing: Container[str] | None = None) -> str:
        """Return the version that a rollback of the service ``name`` returns to.

        ``trial`` is True if requests are copied to another version, or a version is left over. ``existing`` holds the
        versions that can serve. Raises RefusedError if there is none.
        """
        serving = alone(shares)
        if serving and trial:
            return serving
        for each in reversed(self.served):
            usable = existing is None or each.version in existing
            if usable and each.version != serving and each.version not in self.taken_back:
                return each.version
        if len(shares) > 1 and not self.served:
            return main_of(shares)
        raise RefusedError(f"{name} has no earlier version to return to")

    def is_left(self, versions: Iterable[str], shares: Shares) -> bool:
        """Return True if versions are deployed that neither serve nor can be returned to.

        An interrupted command leaves them, and a rollback ends it before it goes further back.
        """
        idle = [each for each in versions if not shares.get(each)]
        known = {each.version for each in self.served} - self.taken_back
        return bool(idle) and not known.intersection(idle)

    def _with(self, entry: Served) -> History:
        if self.last == entry.version:
            return self
        served = (*(each for each in self.served if each.version != entry.version), entry)[-LIMIT:]
        return replace(self, served=served, taken_back=self.taken_back & {each.version for each in served})


def alone(shares: Shares) -> str:
    """Return the version that gets all requests, or ""."""
    serving = [version for version, share in shares.items() if share]
    return serving[0] if len(serving) == 1 else ""


def stable_of(history: History, shares: Shares, version: str) -> str:
    """Return the last version that served alone beside ``version``, or "".

    Of versions that the history does not know it is the one with most requests.
    """
    others = {each: share for each, share in shares.items() if share and each != version}
    known = [each.version for each in reversed(history.served) if each.version in others]
    return known[0] if known else main_of(others)


def after(history: History, shares: Shares, version: str, percent: int, count: int = 0, place: str = "") -> History:
    """Return the history after a version got its percentage; ``shares`` are those before."""
    found = history.observed(shares)
    return found.deployed(version, count, place) if percent == 100 else found


def differences(history: History, shares: Shares, version: str, percent: int) -> list[str]:
    """Return how the shares of all versions differ from those after a deployment of ``version``."""
    wanted = {version: percent}
    if percent < 100:
        wanted[stable_of(history, shares, version) or "another version"] = 100 - percent
    return different(shares, wanted)


def different(shares: Shares, wanted: Shares) -> list[str]:
    """Return how shares differ from the wanted ones."""
    names = dict.fromkeys((*wanted, *shares))
    return [
        f"{name} gets {shares.get(name, 0)} percent, not {wanted.get(name, 0)}"
        for name in names
        if shares.get(name, 0) != wanted.get(name, 0)
    ]


def check_keep(keep: int) -> None:
    """Raise ValueError for a number of earlier versions that a history does not retain."""
    if not 0 <= keep < LIMIT:
        raise ValueError(f"--keep={keep}: expected 0 to {LIMIT - 1} earlier versions; a rollback goes no further back")


def rollback_line(target: Callable[[State], str], state: State) -> str:
    """Return the line of a status that names the version to which a rollback returns."""
    try:
        return f"rollback: {target(state)}"
    except RefusedError:
        return "rollback: no earlier version"


# -- texts ------------------------------------------------------------------------------------------------------------

SERVED, TAKEN_BACK = "served", "taken-back"
"""Names of the two texts of a history, which a platform's own prefix completes."""


def texts_of(history: History, prefix: str = "remora-") -> dict[str, str]:
    """Return a history as two texts of letters, digits, hyphens, underscores and points."""
    entries = (
        each.version + (f"x{each.instances}" if _has_count(each) else "") + (f".{each.place}" if each.place else "")
        for each in history.served
    )
    taken = (each.version for each in history.served if each.version in history.taken_back)
    return {f"{prefix}{SERVED}": _SEPARATOR.join(entries), f"{prefix}{TAKEN_BACK}": _SEPARATOR.join(taken)}


def _has_count(entry: Served) -> bool:
    """Return True if a text needs the number of instances: 0 too after a name like v1x2."""
    return entry.instances > 0 or _COUNT.search(entry.version) is not None


def history_of(texts: Mapping[str, str] | None, prefix: str = "remora-") -> History:
    """Return the history in texts; an empty one for texts of another program."""
    found = texts or {}
    entries = [_ENTRY.fullmatch(each) for each in str(found.get(f"{prefix}{SERVED}") or "").split(_SEPARATOR)]
    served = tuple(
        Served(entry["version"], int(entry["count"] or 0), entry["place"] or "")
        for entry in entries
        if entry is not None and entry["version"]
    )
    taken = str(found.get(f"{prefix}{TAKEN_BACK}") or "").split(_SEPARATOR)
    return History(served[-LIMIT:], frozenset(taken) & {each.version for each in served})
