"""`make bench`: the figures of docs/performance.md, measured on this machine; nothing here asserts anything.

python -m bench [NAME [ARGUMENT ...] ...]: those of ORDER, or all of them. What names no file here is an argument
of the name before it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORDER = (
    "coldstart",
    "memory",
    "throughput",
    "wire",
    "ensemble",
    "worker",
    "busy_model",
    "scheduling",
    "adapters",
    "admission",
    "neighbour",
    "shadow",
    "generation",
    "score",
    "streams",
    "fronts",
    "access_log",
    "keys",
    "tls",
    "storage",
    "walks",
)


def main() -> int:
    wanted: list[list[str]] = []
    for word in sys.argv[1:] or ORDER:
        if not wanted or (HERE / f"{word}.py").exists():
            wanted.append([])
        wanted[-1].append(word)
    for name, *arguments in wanted:
        print(f"## {name}", flush=True)
        sys.argv = [str(HERE / f"{name}.py"), *arguments]
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
