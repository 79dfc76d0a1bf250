"""Registering shared memory where it is not offered."""

from __future__ import annotations

import pytest

from remora.errors import UnsupportedError
from remora.protocols.v2_regions import REGION_RPCS, answer_region
from remora.protocols.v2_routes import Route
from remora.regions import DISABLED, SHARED_MEMORY_OFF


@pytest.mark.parametrize("action", ["system_shm", "cuda_shm"])
def test_without_shared_memory_there_is_nothing_to_list_and_nothing_is_registered(action: str) -> None:
    status = answer_region(Route(action, verb="status"), b"", DISABLED)
    assert (status.status, status.body) == (200, [b"[]"])
    for verb in ("register", "unregister"):
        refused = answer_region(Route(action, verb=verb, region="r"), b"{bad", DISABLED)
        assert refused.status == 501
        assert SHARED_MEMORY_OFF.encode() in b"".join(bytes(piece) for piece in refused.body)


@pytest.mark.parametrize("rpc", ["SystemSharedMemoryRegister", "CudaSharedMemoryRegister"])
def test_over_grpc_too(rpc: str) -> None:
    with pytest.raises(UnsupportedError, match="Client shared memory is disabled"):
        REGION_RPCS[rpc](b"", DISABLED)
    assert REGION_RPCS["SystemSharedMemoryStatus"](b"", DISABLED) == b""
