"""Probe of a Python process: the longest times during which no other Python thread could run.

Python imports it at the start of a process whose PYTHONPATH has this folder. For each gap of the probe's thread, the
part that the process caused goes to the file of the process in the folder that REMORA_HOLDS names, in milliseconds:
see `processor_time`. The figure is an upper bound, because a thread that holds the interpreter lock may itself wait for
a processor while other threads of the process use theirs without the lock.
"""

import os
import sys
import threading
from pathlib import Path

_PAUSE_S = 0.001
_LEAST_S = 0.01


def _watch(folder: str) -> None:
    process, never = os.getpid(), threading.Event()
    account = _Account(process, [(process, threading.get_native_id())])
    with open(os.path.join(folder, str(process)), "a", buffering=1) as file:
        began = account.look()
        while True:
            never.wait(_PAUSE_S)
            ended = account.look()
            held_s = _caused_s(began, ended, _PAUSE_S)
            if held_s > _LEAST_S:
                file.write(f"{held_s * 1e3:.0f}\n")
            began = ended  # no stall falls between two looks


if "REMORA_HOLDS" in os.environ:
    _tests = str(Path(__file__).parents[2])
    sys.path.append(_tests)
    from support.process.processor_time import Account as _Account
    from support.process.processor_time import caused_s as _caused_s

    sys.path.remove(_tests)
    threading.Thread(target=_watch, args=(os.environ["REMORA_HOLDS"],), daemon=True).start()
