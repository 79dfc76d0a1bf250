"""GPU instances that stop after a CUDA error that only a restart of the process clears.

After some CUDA errors, above all an illegal address, the process cannot use its GPUs: every later call returns the same
error until the process ends. After a failed run one harmless call of the CUDA runtime therefore checks whether the
instance can continue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from remora.backends import Capabilities, Instance, capabilities_of
from remora.backends.arrays import Run
from remora.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from remora.messages import Array, Tensor

if TYPE_CHECKING:
    from remora.system.cuda import Cuda


class GpuHealth:
    """Health of a GPU in this process."""

    def __init__(self, number: int, runtime: Callable[[], Cuda]) -> None:
        self._number = number
        self._runtime: Cuda | None
        try:
            self._runtime = runtime()
        except UnsupportedError:  # the framework has a private CUDA runtime, which cannot be queried
            self._runtime = None

    @property
    def trouble(self) -> str:
        """Reason why the process can use no GPU until a restart, or ""."""
        return "" if self._runtime is None else self._runtime.lost

    def probed(self) -> str:
        """Return `trouble` after a harmless call of the CUDA runtime, which finds it."""
        if self._runtime is not None:
            self._runtime.probe(self._number)
        return self.trouble

    def guarded(self, run: Run) -> Run:
        """Return ``run`` with a check before each call and a probe of the GPU after its failures."""

        def call(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
            if self.trouble:
                raise UnavailableError(self.trouble)
            if self._runtime is not None:
                self._runtime.relax()
            try:
                return run(inputs, wanted)
            except (InvalidArgumentError, UnsupportedError):  # the request is invalid and nothing has run
                raise
            except Exception:
                self.probed()
                raise

        return call


class GpuInstance:
    """Instance whose GPU may be lost to the process.

    Only a restart of the process repairs that.
    """

    quick = False

    def __init__(self, inner: Instance, health: GpuHealth) -> None:
        self.name = inner.name
        self.execute = inner.execute
        self.close = inner.close
        self._inner = capabilities_of(inner)
        self._health = health

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the inner instance; its trouble is fatal if the GPU is lost."""
        inner, health = self._inner, self._health
        return Capabilities(
            devices=inner.devices,
            unhealthy_reason=lambda: health.trouble or inner.trouble,
            fatal=inner.unhealthy_reason is None or bool(health.trouble),
            runs_user_code=False,
        )


@cache
def health_of(number: int) -> GpuHealth:
    """Return the health of a GPU of this process."""
    from remora.system.cuda import cuda  # imported only on machines with a GPU

    return GpuHealth(number, cuda)


def free_gpu_bytes(number: int) -> int | None:
    """Return the free memory of a GPU of this process, None if it is unknown."""
    from remora.system.cuda import cuda  # imported only on machines with a GPU

    try:
        return cuda().free_bytes(number)
    except UnsupportedError:
        return None
