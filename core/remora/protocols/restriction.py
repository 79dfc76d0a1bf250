"""Groups of calls that require a shared secret, for all front ends [H30, R15].

An operator names groups and a header with its value: ``model-repository,statistics:admin-key=secret``. A call of such a
group is answered only if the request carries the header with exactly that value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
GROUP_OF_ACTION: Mapping[str, str] = {
    "live": "health",
    "ready": "health",
    "model_ready": "health",
    "server_metadata": "metadata",
    "model_metadata": "metadata",
    "home": "metadata",
    "pages": "metadata",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "model_config": "model-config",
    "model_stats": "statistics",
    "model_sequences": "statistics",
    "all_stats": "statistics",
    "model_explain": "statistics",
    "startup": "statistics",
    "metrics": "statistics",
    "index": "model-repository",
    "load": "model-repository",
    "unload": "model-repository",
    "release": "model-repository",
    "system_shm": "shared-memory",
    "cuda_shm": "shared-memory",
    "trace": "trace",
    "recent_traces": "trace",
    "logging": "logging",
}
"""The group of each HTTP action, our own pages and metrics among them."""
GROUP_OF_RPC: Mapping[str, str] = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Health.Check": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "SystemSharedMemoryStatus": "shared-memory",
    "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}
"""The group of each RPC of the inference service, and of grpc.health.v1's."""


_WORDS = {"--grpc-restricted-protocol": "protocol"}
"""What Triton calls a group in the errors about a flag, where it is not "api"."""


class _Entry(NamedTuple):
    groups: list[str]
    header: str
    secret: str


def _parse(entry: str, flag: str) -> _Entry:
    """Parse ``GROUP[,GROUP...]:HEADER=VALUE``.

    Raises ValueError, with Triton's text but never with the value.
    """
    place, equals, secret = entry.partition("=")
    groups, colon, header = place.partition(":")
    if not (groups and colon and header and secret):
        # Without "=" the text after the colon may be a secret; without a colon there is only one word.
        shown = f"{place}=..." if equals else f"{groups}{':...' if colon else ''}"
        raise ValueError(f"{flag} option format is '<config name>:<setting>=<value>'. Got {shown}")
    return _Entry(groups.split(","), header, secret)


def fill_in_secrets(entries: Sequence[str], flag: str, read: Callable[[str], str]) -> tuple[str, ...]:
    """Return the entries with ``@PLACE`` replaced by the text of ``read(PLACE)``.

    An entry without ``HEADER=@PLACE`` stays as it is. Raises ValueError for an entry of another form, and what ``read``
    raises.
    """
    filled = []
    for entry in entries:
        groups, header, secret = _parse(entry, flag)
        if secret.startswith("@"):
            secret = read(secret[1:])
            if not secret or secret.startswith("@"):
                what = "begins with @" if secret else "is empty"
                raise ValueError(f"{flag}={','.join(groups)}:{header}=@...: the secret {what}")
        filled.append(f"{','.join(groups)}:{header}={secret}")
    return tuple(filled)


class Restrictions:
    """Groups of calls that require a secret.

    Args:
        entries: each ``GROUP[,GROUP...]:HEADER=VALUE``.
        flag: the flag that the entries came from, for error texts.

    Raises ValueError, in Triton's words, for an entry of another form, an unknown group, or a group named twice. The
    text never contains a secret.
    """

    def __init__(self, entries: Sequence[str] = (), flag: str = "") -> None:
        self._locks: dict[str, tuple[str, bytes]] = {}
        word = _WORDS.get(flag, "api")
        for entry in entries:
            groups, header, secret = _parse(entry, flag)
            if secret.startswith("@"):  # otherwise the file's name would become the secret
                raise ValueError(
                    f"{flag}={','.join(groups)}:{header}=@...: only the command line reads secrets from files"
                )
            for group in groups:
                if group not in GROUPS:
                    raise ValueError(f"unknown restricted {word} '{group}'\n{flag} takes {', '.join(GROUPS)}")
                if group in self._locks:
                    raise ValueError(f"restricted {word} '{group}' can not be specified in multiple config groups")
                self._locks[group] = (header, secret.encode())

    def __bool__(self) -> bool:
        return bool(self._locks)

    def missing(self, group: str, value_of: Callable[[str], bytes | None]) -> str | None:
        """Return the header that a request to ``group`` lacks, or None if the request may pass.

        ``value_of`` returns the value of a request header by its name, or None.
        """
        lock = self._locks.get(group)
        if lock is None:
            return None
        import hmac  # imported here because its cost is only worth it on servers with secrets

        key, secret = lock
        value = value_of(key)
        return None if value is not None and hmac.compare_digest(value, secret) else key
