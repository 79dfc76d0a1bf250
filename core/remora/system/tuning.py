"""Process settings of allocator, thread switching, BLAS threads and garbage collector.

``apply`` is called once, before numpy is imported (memory settings also work later, but only from then on), and
``freeze`` when all models are loaded. docs/performance.md has the measurements. Each setting can be turned off and is
skipped where the system lacks it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

Mallopt = Callable[[int, int], int]
"""glibc's ``mallopt(parameter, value)``, which returns 1 on success."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


class Tuning(NamedTuple):
    """Process settings.

    Attributes:
        malloc_threshold_bytes: blocks below this size come from the heap instead of from fresh zeroed pages, which
            speeds up large bodies by up to 3.7 times. 32 MiB is the maximum that every glibc accepts. 0 leaves the
            allocator alone. glibc only, as the two below.
        malloc_keep_bytes: free memory that the heap keeps before it returns some. 0 leaves it alone.
        malloc_top_pad_bytes: extra bytes by which the heap grows at a time. 0 leaves it alone.
        switch_interval_us: how long a thread may hold the interpreter while another waits, in microseconds. With
            Python's default of 5000 a busy user thread adds that much to every response. 0 leaves it alone.
        blas_threads: threads of OpenMP and the BLAS libraries, for variables that are not set. These libraries size
            their pools by the machine, not by the container's quota. 0 leaves them alone.
        freeze: disable garbage collection during the start, and exempt all objects that exist once the models are
            loaded from it.
    """

    malloc_threshold_bytes: int = 32 << 20
    malloc_keep_bytes: int = 256 << 20
    malloc_top_pad_bytes: int = 16 << 20
    switch_interval_us: int = 100
    blas_threads: int = 1
    freeze: bool = True


def apply(settings: Tuning, environ: MutableMapping[str, str], mallopt: Mallopt | None = None) -> tuple[str, ...]:
    """Apply ``settings`` and return a description of each applied setting for the startup log.

    Args:
        environ: the process's environment, ``os.environ``; variables that are set stay unchanged.
        mallopt: the C library's; looked up when None. The memory settings are skipped where it is missing.
    """
    if settings.freeze:
        gc.disable()  # until `freeze`
    done = _tune_malloc(settings, mallopt or _find_mallopt())
    if settings.switch_interval_us > 0:
        sys.setswitchinterval(settings.switch_interval_us / 1e6)
        done.append(f"switch interval {settings.switch_interval_us} us")
    if settings.blas_threads > 0:
        for name in _THREAD_VARIABLES:
            if name not in environ:
                environ[name] = str(settings.blas_threads)
                done.append(f"{name}={settings.blas_threads}")
    return tuple(done)


def freeze(settings: Tuning) -> None:
    """Exempt all existing objects from garbage collection, and enable it.

    Does not collect first, because the garbage of a start costs less than the 8 ms of a collection.
    """
    if not settings.freeze:
        return
    gc.freeze()
    gc.enable()


def give_back() -> bool:
    """Have the allocator return free memory to the system. Return False where it cannot.

    Models are loaded on several threads, each with a separate heap that would keep its free memory. Takes some
    milliseconds without the GIL.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


def _tune_malloc(settings: Tuning, mallopt: Mallopt | None) -> list[str]:
    if mallopt is None:
        return []
    parameters = (
        ("mmap threshold", _M_MMAP_THRESHOLD, settings.malloc_threshold_bytes),
        ("trim threshold", _M_TRIM_THRESHOLD, settings.malloc_keep_bytes),
        ("top pad", _M_TOP_PAD, settings.malloc_top_pad_bytes),
    )
    return [
        f"malloc {name} {value} bytes"
        for name, parameter, value in parameters
        if value > 0 and mallopt(parameter, value)
    ]


def _find_mallopt() -> Mallopt | None:
    """Return the running C library's ``mallopt``.

    Returns None where it has none (musl, macOS, Windows).
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  some builds of musl have mallopt, but none has this function
        found = library.mallopt
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int)
    found.restype = ctypes.c_int
    return lambda parameter, value: int(found(parameter, value))
