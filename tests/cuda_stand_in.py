"""The CUDA runtime that remora's tests build: `cudart_stand_in.c`, compiled once for each run of the tests."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remora.system.cuda import Cuda

DEVICE, PINNED, OPENED, STREAM = 1, 2, 3, 4
"""The kinds that `StandIn.held` counts."""


class StandIn:
    """The compiled library: as remora uses it, and what tests ask of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        built = folder / "libcudart.so.12"
        source = Path(__file__).with_name("cudart_stand_in.c")
        flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
        subprocess.run(["cc", *flags, str(source), "-o", str(built), "-lpthread", "-lrt"], check=True)
        for name in ("libcudart.so.13", "libcuda.so.1"):  # whatever a process that has it on its path asks for
            (folder / name).symlink_to(built)
        self.library = ctypes.CDLL(str(built))
        self.runtime = Cuda(self.library, self.library)

    def held(self, kind: int) -> int:
        """How much of a kind is held in this process."""
        return int(self.library.stand_in_held(kind))

    def device(self) -> int:
        """The calling thread's device."""
        found = ctypes.c_int()
        assert self.library.cudaGetDevice(ctypes.byref(found)) == 0
        return found.value

    def copies(self) -> int:
        """How often bytes were copied in this process."""
        return int(self.library.stand_in_copies())

    def waits(self) -> int:
        """How often the default stream was waited for in this process."""
        return int(self.library.stand_in_waits())

    @contextmanager
    def broken(self, status: int) -> Iterator[None]:
        """Every call fails with an error from now on, as after a kernel that failed."""
        self.library.stand_in_break(status)
        try:
            yield
        finally:
            self.library.stand_in_break(0)
            self.library.cudaGetLastError()
            self.runtime.lost = ""
