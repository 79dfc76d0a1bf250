"""Names for plug-ins: backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.api import lazily

if TYPE_CHECKING:
    from remora.backends.batching_trial import try_rows
    from remora.backends.external_data import check_external_data
    from remora.backends.gpu_health import GpuHealth, GpuInstance, free_gpu_bytes, health_of
    from remora.backends.onnxruntime.opening import import_onnxruntime, open_session, require_cuda, usable_providers
    from remora.backends.onnxruntime.plan import (
        CPU_PROVIDER,
        CUDA_PROVIDER,
        OPENVINO_PROVIDER,
        TENSORRT_PROVIDER,
        SessionPlan,
        concurrent_instances,
    )
    from remora.backends.transfers import Places, Transfer, transfer_for
    from remora.config.datatypes import DATATYPE_BY_NAME
    from remora.system import cuda
    from remora.system.cuda import Cuda
    from remora.tensors.device import CUDA, HOST, Block, CudaMemory, DeviceArray, DeviceId, Memory, memory_of, on_host

__getattr__ = lazily(
    __name__,
    {
        "remora.backends.batching_trial": "try_rows",
        "remora.backends.external_data": "check_external_data",
        "remora.backends.gpu_health": "GpuHealth GpuInstance free_gpu_bytes health_of",
        "remora.backends.onnxruntime.opening": "import_onnxruntime open_session require_cuda usable_providers",
        "remora.backends.onnxruntime.plan": (
            "CPU_PROVIDER CUDA_PROVIDER OPENVINO_PROVIDER SessionPlan TENSORRT_PROVIDER concurrent_instances"
        ),
        "remora.backends.transfers": "Places Transfer transfer_for",
        "remora.config.datatypes": "DATATYPE_BY_NAME",
        "remora.system": "cuda",
        "remora.system.cuda": "Cuda",
        "remora.tensors.device": "Block CUDA CudaMemory DeviceArray DeviceId HOST Memory memory_of on_host",
    },
)
