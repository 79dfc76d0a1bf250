"""File locks shared by the processes of one machine.

A lock ends with the process that holds it, also when that process is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remora.errors import UnsupportedError


def take(path: Path, *, shared: bool = False, wait: bool = True) -> int:
    """Acquire a lock and return the descriptor that holds it until closed.

    Descriptors of one process exclude each other, too. The holder of an exclusive lock may remove its file. Raises
    BlockingIOError when the lock is taken and ``wait`` is False, UnsupportedError where the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise UnsupportedError("a cache that processes share needs file locks, which this system lacks") from None
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            if _is_there(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was removed while this call waited for it


@contextmanager
def holding(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock exclusively. Raises as `take` does."""
    descriptor = take(path, wait=wait)
    try:
        yield
    finally:
        os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
