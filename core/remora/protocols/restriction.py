"""Which groups of calls need a shared secret (spec H30, R15); the law: decided here, for every front end.

An operator names groups and a header with its value: ``model-repository,statistics:admin-key=secret``. A call of such
a group is answered only when the request carries the header with exactly that value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    "system_shm": "shared-memory",
    "cuda_shm": "shared-memory",
    "trace": "trace",
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


class Restrictions:
    """The groups that need a secret.

    Args:
        entries: each ``GROUP[,GROUP...]:HEADER=VALUE``.
        flag: the flag they came from, for error texts.

    Raises ValueError for an entry of another form, a group nobody knows, or a group named twice.
    """

    def __init__(self, entries: Sequence[str] = (), flag: str = "") -> None:
        self._locks: dict[str, tuple[str, bytes]] = {}
        for entry in entries:
            groups, colon, pair = entry.partition(":")
            key, equals, value = pair.partition("=")
            if not (colon and equals and key):
                raise ValueError(f"{flag}={entry}: expected GROUP[,GROUP...]:HEADER=VALUE")
            for group in groups.split(","):
                if group not in GROUPS:
                    raise ValueError(f"{flag}={entry}: unknown group '{group}', expected one of {', '.join(GROUPS)}")
                if group in self._locks:
                    raise ValueError(f"{flag}={entry}: the group '{group}' is restricted twice")
                self._locks[group] = (key, value.encode())

    def __bool__(self) -> bool:
        return bool(self._locks)

    def missing(self, group: str, value_of: Callable[[str], bytes | None]) -> str | None:
        """The header that a request to ``group`` should have carried; None when it may pass.

        ``value_of`` gives the value of a request header by its name, or None.
        """
        lock = self._locks.get(group)
        if lock is None:
            return None
        import hmac  # with a cost at import that only servers with secrets should pay

        key, value = lock
        given = value_of(key)
        return None if given is not None and hmac.compare_digest(given, value) else key
