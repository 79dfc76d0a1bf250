"""GPU instances that stop when CUDA has failed for good in this process.

Some CUDA errors, an illegal address above all, leave the process unable to use its GPUs: every later call returns the
same error until the process ends. A failed run is therefore followed by one harmless call of the CUDA runtime, whose
result decides whether the instance can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from remora.backends import Instance
from remora.backends.arrays import Run
from remora.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from remora.messages import Array, Tensor

if TYPE_CHECKING:
    from remora.system.cuda import Cuda


class GpuHealth:
    """Whether this process can use a GPU.

    Args:
        number: the GPU's.
        runtime: gives the CUDA runtime; raises UnsupportedError where there is none.
    """

    def __init__(self, number: int, runtime: Callable[[], Cuda]) -> None:
        self._number = number
        self._runtime: Cuda | None
        try:
            self._runtime = runtime()
        except UnsupportedError:  # the framework has one of its own, which cannot be asked
            self._runtime = None

    @property
    def trouble(self) -> str:
        """Why the process can use no GPU until it is restarted; empty while it can."""
        return "" if self._runtime is None else self._runtime.lost

    def guarded(self, run: Run) -> Run:
        """``run``, which is not called once the GPU is lost, and after whose failures the GPU is probed."""

        def call(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
            if self.trouble:
                raise UnavailableError(self.trouble)
            if self._runtime is not None:
                self._runtime.relax()
            try:
                return run(inputs, wanted)
            except (InvalidArgumentError, UnsupportedError):  # the request's fault: nothing has run
                raise
            except Exception:
                if self._runtime is not None:
                    self._runtime.probe(self._number)
                raise

        return call


class GpuInstance:
    """An instance whose GPU may be lost to the process; ``fatal`` says that only a restart of the process helps."""

    fatal = True
    quick = False

    def __init__(self, inner: Instance, health: GpuHealth) -> None:
        self.name = inner.name
        self.execute = inner.execute
        self.close = inner.close
        self.devices: frozenset[tuple[int, int]] = getattr(inner, "devices", frozenset())
        self._health = health

    @property
    def trouble(self) -> str:
        """Why it cannot run anything; empty while it can."""
        return self._health.trouble


@cache
def health_of(number: int) -> GpuHealth:
    """The health of a GPU of this process."""
    from remora.system.cuda import cuda  # only where there is a GPU

    return GpuHealth(number, cuda)
