"""Descriptors and threads of this process, to find leaks.

Only new ones that stay count, because earlier tests may leave threads that are ending and files that are being closed.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

PATIENCE_S = 60.0


class Held(NamedTuple):
    """Threads and the number of descriptors."""

    threads: frozenset[threading.Thread]
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        """Return the current threads and descriptors."""
        return cls(frozenset(threading.enumerate()), len(os.listdir("/proc/self/fd")))

    def grown(self) -> tuple[list[threading.Thread], int]:
        """Return new threads that do not end, and the number of additional descriptors."""
        begun = [thread for thread in threading.enumerate() if thread not in self.threads]
        for thread in begun:
            thread.join(PATIENCE_S)
        stay = [thread for thread in begun if thread.is_alive()]
        return stay, max(0, len(os.listdir("/proc/self/fd")) - self.descriptors)
