"""Selection of GPUs by the rules of CUDA, and queries of the driver through a fake library."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remora.system.gpus import Gpu, GpuReading, Gpus, capable, visible

A, B, C = (Gpu(f"GPU-{letter * 8}", capability=(8, 0), card=at) for at, letter in enumerate("abc"))
PART1 = B._replace(uuid="MIG-11111111", mig=True, parent=B.uuid)
PART2 = B._replace(uuid="MIG-22222222", mig=True, parent=B.uuid)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("2,0", [C, A]),
        ("0, 1", [A, B]),
        ("1,7,0", [B]),  # what follows one that is not there does not count
        ("0,0", [A]),
        ("GPU-bbbb,0", [B, A]),
        ("GPU-", []),  # fits more than one
        ("all", []),
        ("NoDevFiles", []),
        ("9" * 30, []),
    ],
)
def test_the_environment_chooses_and_numbers_devices(setting: str | None, expected: list[Gpu]) -> None:
    assert list(visible([A, B, C], setting)) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("MIG-2222", [PART2]),
        ("MIG-1111,MIG-2222", [PART1]),  # a process can use one of them
        ("1", [PART1]),  # a divided device is its first instance
        (None, [PART1]),
        ("0", [A]),
    ],
)
def test_a_divided_device_is_used_by_its_instances(setting: str | None, expected: list[Gpu]) -> None:
    assert list(visible([A, B, PART1, PART2], setting)) == expected


def test_devices_below_the_least_capability_are_left_out_and_the_others_keep_their_numbers() -> None:
    old = A._replace(capability=(5, 2))
    unknown = B._replace(capability=(0, 0))
    assert capable(visible([old, unknown, C], None), (6, 0)) == (1, 2)
    assert capable([old], (5, 2)) == (0,), "the least is enough"


class NotSupportedError(Exception):
    pass


@dataclass
class FakeNvml:
    """The driver's library as ``pynvml`` gives it: a device with everything, and a divided one that tells little."""

    calls: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("init")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return ("GPU-one", "GPU-two")[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:  # noqa: N802
        return handle.encode() if handle == "GPU-one" else handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "A100"

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> list[int]:  # noqa: N802
        return [8, 0]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=1000, used=250, free=750)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        if handle == "GPU-one":
            raise NotSupportedError
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, at: int) -> str:  # noqa: N802
        if at not in (0, 3):
            raise NotSupportedError
        return f"MIG-{at}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        if handle.startswith("MIG"):
            raise NotSupportedError
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        if handle.startswith("MIG"):
            raise NotSupportedError
        return 65_000

    nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetPowerUsage  # noqa: N815
    nvmlDeviceGetTotalEnergyConsumption = nvmlDeviceGetPowerUsage  # noqa: N815


def driver(tmp_path: Path, cards: int) -> Path:
    for card in range(cards):
        (tmp_path / "gpus" / f"0000:0{card}:00.0").mkdir(parents=True)
    return tmp_path / "gpus"


def never() -> Any:
    raise AssertionError("nvidia-ml-py is imported where there is no driver")


class Libraries:
    """The driver's libraries that the loader finds. ``devices``: how many CUDA shows; None: it cannot say."""

    def __init__(self, *names: str, devices: int | None = None) -> None:
        self.names = names
        self.devices = devices
        self.opened: list[str] = []

    def __call__(self, name: str) -> Any:
        self.opened.append(name)
        if name not in self.names:
            raise OSError(f"{name}: cannot open shared object file")
        return self

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0 if self.devices is not None else 999

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.devices
        return 0


def gpus_of(
    listed: Path, load: Any = never, setting: str | None = None, libraries: Any = None, devices: tuple[Path, ...] = ()
) -> Gpus:
    return Gpus(listed, devices, load, lambda: setting, libraries or Libraries())


def test_a_machine_without_a_driver_is_asked_once(tmp_path: Path) -> None:
    libraries = Libraries()
    gpus = gpus_of(tmp_path / "gpus", libraries=libraries)
    assert gpus.visible() == ()
    assert gpus.readings() == []
    assert libraries.opened == ["libnvidia-ml.so.1"]


@pytest.mark.parametrize("sign", ["nvidiactl", "library"])
def test_devices_are_found_where_procfs_lists_none(tmp_path: Path, sign: str) -> None:
    """As under gVisor, under WSL2, and in containers that hide /proc/driver."""
    (tmp_path / "nvidiactl").touch()
    devices = (tmp_path / "nvidiactl",) if sign == "nvidiactl" else ()
    libraries = Libraries("libnvidia-ml.so.1") if sign == "library" else Libraries()
    gpus = gpus_of(tmp_path / "gpus", FakeNvml, "0", libraries, devices)
    assert [gpu.uuid for gpu in gpus.visible()] == ["GPU-one"]
    assert [reading.uuid for reading in gpus.readings()] == ["GPU-one"]


def missing() -> Any:
    raise ImportError("no pynvml")


def test_without_nvml_cuda_counts_the_devices_that_it_shows(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    libraries = Libraries("libcuda.so.1", devices=2)
    gpus = gpus_of(tmp_path / "gpus", missing, "1,0", libraries, (tmp_path / "dxg",))
    assert [gpu.uuid for gpu in gpus.visible()] == ["GPU-0", "GPU-1"], "CUDA heeds the setting itself"
    libraries.devices = 0
    assert gpus.visible() == ()
    assert gpus.readings() == []


def test_a_library_without_a_device_is_not_a_gpu_and_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image that holds the driver's libraries, on a machine without a GPU."""
    gpus = gpus_of(tmp_path / "gpus", missing, None, Libraries("libnvidia-ml.so.1", "libcuda.so.1"))
    assert gpus.visible() == ()
    assert "WARNING" not in {record.levelname for record in caplog.records}


def test_devices_and_the_instances_of_divided_ones_are_found(tmp_path: Path) -> None:
    nvml = FakeNvml()
    gpus = gpus_of(driver(tmp_path, 2), lambda: nvml, "MIG-3")
    (part,) = gpus.visible()
    assert part == Gpu("MIG-3", "A100", 1000, (8, 0), 1, True, "GPU-two")
    assert gpus.visible() == (part,)
    assert nvml.calls == ["init"]


def test_readings_leave_out_what_a_device_does_not_tell(tmp_path: Path) -> None:
    whole = gpus_of(driver(tmp_path, 2), FakeNvml, "0").readings()
    assert whole == [GpuReading("GPU-one", 0.37, 1000, 250, 65.0, 65.0, 65.0)]
    part = gpus_of(tmp_path / "gpus", FakeNvml, "1").readings()
    assert part == [GpuReading("MIG-0", None, 1000, 250, None, None, None)]


def test_a_device_that_is_lost_takes_no_other_with_it(tmp_path: Path) -> None:
    class Lost(FakeNvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
            if index == 1:
                raise NotSupportedError("GPU is lost")
            return "GPU-one"

    gpus = gpus_of(driver(tmp_path, 2), Lost, None)
    assert [gpu.uuid for gpu in gpus.visible()] == ["GPU-one"]
    assert [reading.uuid for reading in gpus.readings()] == ["GPU-one"]


def test_a_device_that_is_lost_between_two_questions_has_no_readings(tmp_path: Path) -> None:
    class Losing(FakeNvml):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
            raise NotSupportedError("GPU is lost")

    assert gpus_of(driver(tmp_path, 2), Losing, "0").readings() == [GpuReading("GPU-one")]


def test_a_driver_that_goes_away_leaves_the_number_of_devices(tmp_path: Path) -> None:
    class Away(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise NotSupportedError("the driver is being reset")

    assert len(gpus_of(driver(tmp_path, 2), Away, None).visible()) == 2


def test_without_the_library_the_devices_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpus = gpus_of(driver(tmp_path, 2), missing, None)
    assert len(gpus.visible()) == 2
    assert gpus.readings() == []
    assert caplog.text.count("pip install nvidia-ml-py") == 1


def test_a_driver_that_cannot_be_used_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise NotSupportedError("Driver/library version mismatch")

    gpus = gpus_of(driver(tmp_path, 1), Broken, None)
    assert len(gpus.visible()) == 1
    assert gpus.readings() == []
    assert caplog.text.count("version mismatch") == 1
