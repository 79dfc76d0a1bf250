"""Temporary folders that the next start removes if their process was killed.

Invariant: the folder of a process that runs is never removed. Each folder contains a lock, which ends with its process.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

from remora.errors import UnsupportedError
from remora.system import locks

_PREFIX = "remora-"
_LOCK = "remora-lock"


class TemporaryFolder:
    """Temporary folder that is removed with this object, or when the process ends.

    Args:
        kind: what the folder contains, as a part of its name.
        name: name of the folder inside, which is ``path``.
    """

    def __init__(self, kind: str, name: str = "files") -> None:
        outer, lock = _make(f"{_PREFIX}{kind}-")
        self._finalizer = weakref.finalize(self, _remove, outer, lock)
        self.path = outer / name
        """Empty folder."""
        self.path.mkdir()

    def remove(self) -> None:
        """Remove the folder now. Idempotent."""
        self._finalizer()


def _make(prefix: str) -> tuple[Path, int | None]:
    """Create a folder and return it with its lock's descriptor.

    Systems without file locks have no descriptor.
    """
    import tempfile  # imported here, as shutil below, because few servers need temporary folders

    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            return folder, locks.take(folder / _LOCK)
        except UnsupportedError:
            return folder, None
        except FileNotFoundError:  # another process removed it as a leftover
            continue


def _remove(folder: Path, lock: int | None) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def remove_left_behind(root: Path | None = None) -> None:
    """Remove the folders of this user's processes that ended without removing them."""
    import shutil
    import tempfile

    for folder in (root or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        try:
            state = folder.lstat()
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or not (folder / _LOCK).exists():
                continue
            with locks.holding(folder / _LOCK, wait=False):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, UnsupportedError):  # its process still runs, or the folder was removed meanwhile
            continue
