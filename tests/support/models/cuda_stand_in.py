"""CUDA runtime for tests, `cudart_stand_in.c` compiled once per test run."""

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
    """Compiled library with remora's binding and the counters for tests."""

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
        """Return the amount of a resource in use by this process."""
        return int(self.library.stand_in_held(kind))

    def device(self) -> int:
        """Return the calling thread's device."""
        found = ctypes.c_int()
        assert self.library.cudaGetDevice(ctypes.byref(found)) == 0
        return found.value

    def copies(self) -> int:
        """Return the number of copies in this process."""
        return int(self.library.stand_in_copies())

    def waits(self) -> int:
        """Return the number of waits for the default stream in this process."""
        return int(self.library.stand_in_waits())

    @contextmanager
    def broken(self, status: int) -> Iterator[None]:
        """Make every further call fail, as after a failed kernel."""
        self.library.stand_in_break(status)
        try:
            yield
        finally:
            self.library.stand_in_break(0)
            self.library.cudaGetLastError()
            self.runtime.lost = ""
