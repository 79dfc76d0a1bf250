"""API keys, the roles that they grant, and the permissions that requests need. Pure.

A key is a random text of which the server stores only the SHA-256 digest: 256 random bits cannot be guessed, so a slow
hash would only cost time. A request carries its key as ``X-API-Key`` or ``Authorization: Bearer``, in
HTTP headers or gRPC metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from remora.options.roles import CONTROL, DEPLOY, INFER, METADATA, READ, ROLES
from remora.protocols.restriction import GROUP_OF_ACTION, GROUP_OF_RPC

OPEN = ""
"""Permission of requests that need no key: the probes of the server, and the page, which has no data."""

GROUP_PERMISSIONS = {
    "health": METADATA,
    "metadata": METADATA,
    "inference": INFER,
    "model-config": READ,
    "statistics": READ,
    "model-repository": CONTROL,
    "shared-memory": CONTROL,
    "trace": CONTROL,
    "logging": CONTROL,
}
LOAD_CONTENT = "load_content"
"""Action of a load that brings a configuration, files or the path of a folder; a part of the action ``load``."""
_OF_ACTION = {LOAD_CONTENT: DEPLOY, "live": OPEN, "ready": OPEN, "home": OPEN, "pages": READ, "index": READ}
_OF_RPC = {
    "ServerLive": OPEN,
    "ServerReady": OPEN,
    "Health.Check": OPEN,
    "RepositoryIndex": READ,
    "SystemSharedMemoryStatus": READ,
    "CudaSharedMemoryStatus": READ,
}
_SERVICE = "inference.GRPCInferenceService"
_OF_PATH = {
    "/grpc.health.v1.Health/Check" if rpc == "Health.Check" else f"/{_SERVICE}/{rpc}": _OF_RPC.get(
        rpc, GROUP_PERMISSIONS[group]
    )
    for rpc, group in GROUP_OF_RPC.items()
}
_READABLE = frozenset(("shared-memory", "trace", "logging"))
"""Groups whose HTTP routes read with GET and change with POST; over gRPC one message does both."""
_SAFE_METHODS = ("GET", "HEAD")
_OF_CALL = frozenset((b":path", b"x-api-key", b"authorization"))
_API_KEY_SIZE, _AUTHORIZATION_SIZE = len(b"x-api-key"), len(b"authorization")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HASHED = "sha256:"


def permission_of_action(action: str, method: str) -> str:
    """Return the permission that an HTTP action of `GROUP_OF_ACTION` needs."""
    found = _OF_ACTION.get(action)
    if found is not None:
        return found
    group = GROUP_OF_ACTION[action]
    return READ if (group in _READABLE or action == "release") and method in _SAFE_METHODS else GROUP_PERMISSIONS[group]


def permission_of_call(path: str) -> str:
    """Return the permission that a gRPC call needs by its path, ``/SERVICE/METHOD``.

    Reflection and calls that the server does not have need one too, so that names cannot be probed.
    """
    return _OF_PATH.get(path, METADATA)


class Limits(NamedTuple):
    """Limits of a key, 0 for none.

    They are requests a second, requests at once beyond that rate, and requests in flight.
    """

    requests_per_second: float = 0.0
    burst: int = 0
    concurrent: int = 0


class Caller(NamedTuple):
    """Holder of a key or token: its name, roles, permissions, and limits if it has any."""

    name: str
    roles: tuple[str, ...]
    permissions: frozenset[str]
    limits: Limits | None = None
    title: str = ""
    """Name in messages, with the kind of the credential."""


_UNLIMITED = Limits()


def caller_of(name: str, roles: Sequence[str], limits: Limits = _UNLIMITED) -> Caller:
    """Return the caller with these roles.

    Raises ValueError for an invalid name or an unknown role.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name[:64]}' is not the name of a key: expected up to 64 letters, digits and . _ @ -")
    unknown = [role for role in roles if role not in ROLES]
    if unknown or not roles:
        raise ValueError(f"key '{name}': expected roles of {', '.join(ROLES)}, got {', '.join(unknown) or 'none'}")
    return Caller(name, tuple(roles), _permissions_of(roles), limits if any(limits) else None, f"API key '{name}'")


def caller_of_token(name: str, roles: Sequence[str], limits: Limits = _UNLIMITED) -> Caller:
    """Return the holder of a token with these roles, perhaps none."""
    title = f"token of '{name}'"
    return Caller(name, tuple(roles), _permissions_of(roles), limits if any(limits) else None, title)


def _permissions_of(roles: Sequence[str]) -> frozenset[str]:
    return frozenset().union(*(ROLES[role] for role in roles))


def credential_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key among the headers of a request, or None.

    ``X-API-Key`` precedes ``Authorization``, because a platform in front may use the latter itself.
    """
    bearer = None
    for name, value in headers:
        size = len(name)
        if size == _API_KEY_SIZE and name.lower() == b"x-api-key":
            return value.strip() or None
        if size == _AUTHORIZATION_SIZE and name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].strip()
    return bearer or None


def is_credential(name: str, value: str) -> bool:
    """Return True for a header in which `credential_of` finds a key or token."""
    lower = name.lower()
    return lower == "x-api-key" or (lower == "authorization" and value.lstrip()[:6].lower() == "bearer")


def call_of(fields: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes | None]:
    """Return the path of a gRPC call and the key that `credential_of` returns, in one pass.

    HTTP/2 sends names in lower case (RFC 9113 8.2.1), so that a set finds the few fields that matter.
    """
    path, key, bearer = b"", None, None
    for name, value in fields:
        if name in _OF_CALL:
            if name == b":path":
                path = path or value
            elif name == b"x-api-key":
                key = value.strip() if key is None else key
            elif value[:7].lower() == b"bearer ":
                bearer = value[7:].strip()
    return path, (bearer if key is None else key) or None


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key."""
    from hashlib import sha256  # imported here, because servers without keys need no hash

    return sha256(key).digest()


class KeyEntry(NamedTuple):
    """Stored form of a key: name, roles, SHA-256 digest in hexadecimal, day of creation, limits."""

    name: str
    roles: tuple[str, ...]
    sha256: str
    created: str = ""
    requests_per_second: float = 0.0
    burst: int = 0
    concurrent: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_second, self.burst, self.concurrent)


def read_entries(text: str) -> tuple[KeyEntry, ...]:
    """Parse a file of keys.

    It is ``{"keys": [{"name": ..., "roles": [...], "sha256": ...}]}``; the other members of `KeyEntry` are optional.
    Raises ValueError, which names the entry and the member, and never repeats a value that may be a secret.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    rows = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise ValueError('expected {"keys": [...]}')
    entries = tuple(_entry(number, row) for number, row in enumerate(rows, 1))
    _check_names(entries)
    return entries


def _entry(number: int, row: Any) -> KeyEntry:
    members = row if isinstance(row, dict) else {}
    strange = sorted(str(name) for name in members.keys() - set(KeyEntry._fields))
    name, roles, digest = (members.get(member) for member in ("name", "roles", "sha256"))
    if strange:
        raise ValueError(f"key {number} has the unknown member '{strange[0]}'")
    if not isinstance(name, str) or not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError(f"key {number}: expected a name and a list of roles")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"key {number}: expected 64 hexadecimal digits in lower case as sha256")
    caller_of(name, roles)
    limits = Limits(*(_limit(name, members, member) for member in Limits._fields))
    return KeyEntry(name, tuple(roles), digest, str(members.get("created") or ""), *limits)


def _limit(name: str, members: Mapping[str, Any], member: str) -> Any:
    value = members.get(member, 0)
    whole = member != "requests_per_second"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 <= value < 1e9:
        raise ValueError(f"key '{name}': expected a {'whole ' if whole else ''}number from 0 on as {member}")
    return value


def _check_names(entries: Iterable[KeyEntry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise ValueError(f"two keys have the name '{entry.name}'")
        seen.add(entry.name)


def print_entries(entries: Iterable[KeyEntry]) -> str:
    """Return the text of a file of keys; the reverse of `read_entries`."""
    rows = [{name: value for name, value in entry._asdict().items() if value} for entry in entries]
    return json.dumps({"keys": rows}, indent=2) + "\n"


def hashed_entries(words: Sequence[str], read: Callable[[str], str]) -> tuple[str, ...]:
    """Return ``--api-key`` words with each ``@PLACE`` replaced by the digest of ``read(PLACE)``.

    Raises ValueError for a word that carries the key itself, and what ``read`` raises.
    """
    hashed = []
    for word in words:
        name, equals, place = word.partition("=")
        shown = f"--api-key {name}=..."
        if not equals or ":" not in name:
            raise ValueError("--api-key: expected NAME:ROLE,...=@FILE or NAME:ROLE,...=@env:VARIABLE")
        if place.startswith("@"):
            key = read(place[1:]).strip().encode()
            if not key:
                raise ValueError(f"{shown}: the key is empty")
            place = _HASHED + digest_of(key).hex()
        if not place.startswith(_HASHED):
            raise ValueError(
                f"{shown}: the process list would show the key; give @FILE, @env:VARIABLE or sha256:DIGEST"
            )
        hashed.append(f"{name}={place}")
    for word in hashed:
        parse_word(word)
    return tuple(hashed)


def parse_word(word: str) -> KeyEntry:
    """Return the entry of a word ``NAME:ROLE,...=sha256:DIGEST``. Raises ValueError."""
    place, _, digest = word.partition(f"={_HASHED}")
    name, _, roles = place.partition(":")
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"--api-key {place}=...: expected 64 hexadecimal digits in lower case after sha256:")
    caller_of(name, roles.split(","))
    return KeyEntry(name, tuple(roles.split(",")), digest)


class Keys:
    """Callers by the digests of their keys. Immutable: changed keys are another object.

    Raises ValueError if two entries have the same name.
    """

    def __init__(self, entries: Sequence[KeyEntry] = ()) -> None:
        import hmac  # imported here, because servers without keys need no digests
        from hashlib import sha256

        _check_names(entries)
        self._callers = {bytes.fromhex(each.sha256): caller_of(each.name, each.roles, each.limits) for each in entries}
        self._digests = {digest: digest for digest in self._callers}
        self._found: dict[bytes, Caller] = {}  # valid keys that were found before
        self._sha256 = sha256
        self._equal = hmac.compare_digest

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, credential: bytes) -> Caller | None:
        """Return the caller with this key, or None.

        The time reveals nothing about the keys: the lookups are by hashes that a client cannot predict (SHA-256, and
        Python's keyed hash for keys that were found before), and the comparison of digests takes constant time.
        """
        caller = self._found.get(credential)
        if caller is not None:
            return caller
        digest = self._sha256(credential).digest()
        stored = self._digests.get(digest)
        if stored is None or not self._equal(stored, digest):
            return None
        caller = self._found[credential] = self._callers[digest]
        return caller
