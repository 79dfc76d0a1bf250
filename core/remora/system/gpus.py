"""NVIDIA GPUs that this process may use, and their readings.

``Gpus`` reads the driver's library, NVML, through ``nvidia-ml-py``. `visible` applies ``CUDA_VISIBLE_DEVICES`` to the
machine's devices, as a pure function. Devices are numbered as CUDA numbers them, in PCI bus order.

Invariant: a machine without a driver is probed once and imports nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)
_LISTED = Path("/proc/driver/nvidia/gpus")
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""The driver's device file, and that of WSL2; gVisor and some containers have these without a list in procfs."""
_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"


class Gpu(NamedTuple):
    """A device as CUDA numbers it, or a MIG instance of a device.

    ``capability`` is its compute capability, (0, 0) if unknown. ``card`` is the index of its device on the machine.
    """

    uuid: str
    name: str = ""
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    card: int = 0
    mig: bool = False
    parent: str = ""


class GpuReading(NamedTuple):
    """Current readings of a device, None where it reports none. Joules count from driver load."""

    uuid: str
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None


def visible(found: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """Return the devices that a process may use, numbered by their position in the result.

    Args:
        found: the machine's devices, each before its MIG instances. A device with instances is not usable itself.
        setting: ``CUDA_VISIBLE_DEVICES``: indices or UUID prefixes; None when unset. As in CUDA, entries after the
            first invalid one are ignored, and only one MIG instance can be used.
    """
    divided = {gpu.parent for gpu in found if gpu.mig}
    whole = [gpu for gpu in found if not gpu.mig]
    chosen: list[Gpu] = []
    for word in [str(place) for place in range(len(whole))] if setting is None else setting.split(","):
        gpu = _meant(word.strip(), whole, found)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    usable: list[Gpu] = []
    for gpu in chosen:
        usable += [part for part in found if part.parent == gpu.uuid][:1] if gpu.uuid in divided else [gpu]
    parts = [gpu for gpu in usable if gpu.mig]
    return tuple(parts[:1] if parts else usable)


def capable(devices: Sequence[Gpu], least: tuple[int, int]) -> tuple[int, ...]:
    """Return the indices of the `visible` devices with sufficient compute capability [I07].

    An unknown capability counts as sufficient.
    """
    return tuple(number for number, gpu in enumerate(devices) if gpu.capability == (0, 0) or gpu.capability >= least)


def _meant(word: str, whole: Sequence[Gpu], found: Sequence[Gpu]) -> Gpu | None:
    if word.isascii() and word.isdigit():
        return whole[int(word)] if len(word) < 6 and int(word) < len(whole) else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    fitting = [gpu for gpu in found if gpu.uuid.startswith(word)]
    return fitting[0] if len(fitting) == 1 else None


class Gpus:
    """The machine's GPUs. Thread-safe. Nothing is imported or opened without a driver.

    Args:
        listed: directory in which the driver of some machines lists its devices.
        devices: files that exist where a driver is installed.
        load: imports ``pynvml``; raises ImportError.
        setting: returns ``CUDA_VISIBLE_DEVICES``; by default from the environment.
        open_library: loads a library by name; raises OSError.
    """

    def __init__(
        self,
        listed: Path = _LISTED,
        devices: Sequence[Path] = _DEVICES,
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
        setting: Callable[[], str | None] = lambda: os.environ.get("CUDA_VISIBLE_DEVICES"),
        open_library: Callable[[str], Any] = ctypes.CDLL,
    ) -> None:
        self._listed = listed
        self._signs = (listed, *devices)
        self._load = load
        self._setting = setting
        self._open_library = open_library
        self._opening = threading.Lock()
        self._nvml: Any = None
        self._opened = False
        self._driver = False

    def visible(self) -> tuple[Gpu, ...]:
        """Return the devices that this process may use (see `visible`)."""
        nvml = self._library()
        count = None if nvml is None else _query(nvml.nvmlDeviceGetCount)
        if count is None:
            return self._counted() if self._driver else ()
        found: list[Gpu] = []
        for index in range(count):
            found += _query(partial(_described, nvml, index)) or ()  # a device that has fallen off the bus is skipped
        return visible(found, self._setting())

    def readings(self) -> list[GpuReading]:
        """Return the readings of the visible devices, empty without NVML."""
        nvml = self._library()
        if nvml is None:
            return []
        return [_reading(nvml, gpu) for gpu in self.visible()]

    def energies(self) -> dict[str, float]:
        """Return the energy that each visible device has used since driver load, in joules by UUID."""
        return {reading.uuid: reading.energy_j for reading in self.readings() if reading.energy_j is not None}

    def _counted(self) -> tuple[Gpu, ...]:
        """Return the visible devices without NVML, of which only the number is known."""
        count = _counted_by_cuda(self._open_library)
        if count is not None:  # CUDA applies CUDA_VISIBLE_DEVICES itself
            return tuple(Gpu(f"GPU-{index}", card=index) for index in range(count))
        try:
            cards = len(list(self._listed.iterdir()))
        except OSError:
            return ()
        return visible([Gpu(f"GPU-{index}", card=index) for index in range(cards)], self._setting())

    def _library(self) -> Any:
        with self._opening:
            if not self._opened:
                self._opened = True
                signs = any(sign.exists() for sign in self._signs)
                self._driver = signs or self._opens(_NVML)
                if self._driver:
                    self._nvml = self._initialised(logging.WARNING if signs else logging.DEBUG)
            return self._nvml

    def _opens(self, name: str) -> bool:
        try:
            self._open_library(name)
        except OSError:
            return False
        return True

    def _initialised(self, level: int) -> Any:
        """Return NVML, initialised, or log why it cannot be used and return None."""
        try:
            nvml = self._load()
            nvml.nvmlInit()
        except ImportError:
            _log.log(level, "there are GPUs here, but no metrics of them: pip install nvidia-ml-py")
        except Exception as error:  # NVMLError cannot be named here, because its module may be missing
            _log.log(level, "the GPU driver's library cannot be used: %s", error)
        else:
            return nvml
        return None


def _counted_by_cuda(open_library: Callable[[str], Any]) -> int | None:
    """Return the number of devices that CUDA shows this process.

    Returns None without a working driver.
    """
    count = ctypes.c_int()
    try:
        driver = open_library(_CUDA)
        ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return None
    return count.value if ready else None


def _described(nvml: Any, index: int) -> list[Gpu]:
    """Return a device and its MIG instances. Raises NVML's errors."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    capability = _query(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))) or (0, 0)
    least = (int(capability[0]), int(capability[1]))
    gpu = Gpu(uuid, _text(nvml.nvmlDeviceGetName(handle)), _memory(nvml, handle), least, index)
    parts = [
        gpu._replace(uuid=_text(nvml.nvmlDeviceGetUUID(part)), memory_bytes=_memory(nvml, part), mig=True, parent=uuid)
        for part in _parts(nvml, handle)
    ]
    return [gpu, *parts]


def _memory(nvml: Any, handle: Any) -> int:
    return _query(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)) or 0


def _parts(nvml: Any, handle: Any) -> list[Any]:
    mode = _query(lambda: nvml.nvmlDeviceGetMigMode(handle))
    if not mode or not mode[0]:
        return []
    most = _query(lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0
    parts = [_query(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, at)) for at in range(most)]
    return [part for part in parts if part is not None]


def _reading(nvml: Any, gpu: Gpu) -> GpuReading:
    handle = _query(lambda: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    if handle is None:
        return GpuReading(gpu.uuid)
    memory = _query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    busy = _query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    power = _query(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    limit = _query(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    energy = _query(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)
    return GpuReading(gpu.uuid, busy, memory and int(memory.total), memory and int(memory.used), power, limit, energy)


def _query(ask: Callable[[], Any]) -> Any:
    """Return the driver's reply.

    Returns None for what this device lacks or this user may not read.
    """
    try:
        return ask()
    except Exception:  # NVMLError, a class of a module that is not imported here
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
