"""Probe of a server process: the longest times during which no other Python thread could run.

Python imports it at the start of a process whose PYTHONPATH has this folder. For each gap of the probe's thread, the
processor time of the process in it goes to the file that REMORA_HOLDS names, in milliseconds. Time in which a busy
machine does not run the process does not count. The figure is an upper bound, because work that has released the
interpreter lock counts while a busy machine does not run the probe.
"""

import os
import threading
import time

_PAUSE_S = 0.001


def _watch(name: str) -> None:
    never = threading.Event()
    with open(name, "a", buffering=1) as file:
        while True:
            used_s, began_s = time.process_time(), time.perf_counter()
            never.wait(_PAUSE_S)
            held_s = min(time.perf_counter() - began_s - _PAUSE_S, time.process_time() - used_s)
            if held_s > 10 * _PAUSE_S:
                file.write(f"{held_s * 1e3:.0f}\n")


if "REMORA_HOLDS" in os.environ:
    threading.Thread(target=_watch, args=(os.environ["REMORA_HOLDS"],), daemon=True).start()
