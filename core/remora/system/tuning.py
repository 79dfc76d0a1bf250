"""Settings of the process that make serving faster; the law: each can be turned off, and none is an error to lack.

``apply`` is called once, before numpy is imported (later the memory settings still count, but only from then on), and
``freeze`` when all models are loaded. The figures are those of docs/performance.md.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

Mallopt = Callable[[int, int], int]
"""glibc's ``mallopt(parameter, value)``: 1 when it was taken."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


class Tuning(NamedTuple):
    """What to set.

    Attributes:
        malloc_threshold_bytes: blocks below this size come from the heap instead of being fresh zeroed pages of the
            system each time; large bodies gain up to 3.7 times. 32 MiB is the most that every glibc takes. 0 leaves
            the allocator alone. glibc only, as the two below.
        malloc_keep_bytes: how much free memory the heap keeps before it gives some back. 0 leaves it alone.
        malloc_top_pad_bytes: by how much more than needed the heap grows at a time. 0 leaves it alone.
        switch_interval_us: how long a thread may hold the interpreter while another waits, in microseconds. Python's
            own 5000 lets a busy user thread add that much to every answer. 0 leaves it alone.
        blas_threads: how many threads OpenMP and the BLAS libraries start, for variables that are not set. They size
            their pools by the machine, not by the container's quota. 0 leaves them alone.
        freeze: let no garbage be collected while starting, and take everything that lives once the models are loaded
            out of the collector's sight.
    """

    malloc_threshold_bytes: int = 32 << 20
    malloc_keep_bytes: int = 256 << 20
    malloc_top_pad_bytes: int = 16 << 20
    switch_interval_us: int = 100
    blas_threads: int = 1
    freeze: bool = True


def apply(settings: Tuning, environ: MutableMapping[str, str], mallopt: Mallopt | None = None) -> tuple[str, ...]:
    """Set what ``settings`` say and return what was set, in words, for the start's log.

    Args:
        environ: the process's environment, ``os.environ``; variables that are set stay as they are.
        mallopt: the C library's; looked up when None. Where there is none the memory settings are left out.
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


def freeze(settings: Tuning) -> int:
    """Let the collector forget all there is, and go on. How many objects it no longer looks at.

    Nothing is collected first: what little garbage a start leaves costs less than the 8 ms of looking for it.
    """
    if not settings.freeze:
        return 0
    gc.freeze()
    gc.enable()
    return gc.get_freeze_count()


def give_back() -> bool:
    """Let the allocator return what loading has left free to the system; False where it cannot be told to.

    Models load on several threads, each with a heap of its own, and what one has used stays with it otherwise. Takes
    some milliseconds, without the interpreter.
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
    wishes = (
        ("mmap threshold", _M_MMAP_THRESHOLD, settings.malloc_threshold_bytes),
        ("trim threshold", _M_TRIM_THRESHOLD, settings.malloc_keep_bytes),
        ("top pad", _M_TOP_PAD, settings.malloc_top_pad_bytes),
    )
    return [
        f"malloc {name} {value} bytes" for name, parameter, value in wishes if value > 0 and mallopt(parameter, value)
    ]


def _find_mallopt() -> Mallopt | None:
    """The running C library's ``mallopt``; None where it has none (musl, macOS, Windows)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  musl answers to mallopt's name in some builds, but not to this one
        found = library.mallopt
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int)
    found.restype = ctypes.c_int
    return lambda parameter, value: int(found(parameter, value))
