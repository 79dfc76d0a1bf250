"""What this process holds: descriptors and threads; the law: only what is new and stays counts.

Tests before may have left threads that end, and files that are closed, while another test looks.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

PATIENCE_S = 30.0


class Held(NamedTuple):
    """Threads, and how many descriptors there are."""

    threads: frozenset[threading.Thread]
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        """What is held at this moment."""
        return cls(frozenset(threading.enumerate()), len(os.listdir("/proc/self/fd")))

    def grown(self) -> tuple[list[threading.Thread], int]:
        """Threads that have begun since and do not end, and how many descriptors there are more."""
        begun = [thread for thread in threading.enumerate() if thread not in self.threads]
        for thread in begun:
            thread.join(PATIENCE_S)
        stay = [thread for thread in begun if thread.is_alive()]
        return stay, max(0, len(os.listdir("/proc/self/fd")) - self.descriptors)
