"""Reading of mutated inputs, and the report of one that fails (`make fuzz`).

    python -m tests.fuzz [TARGET ...] [--seconds 60] [--seed 1] [--repeat FILE]

An input fails if its reader raises an error that it does not document, or takes longer than LIMIT_S. Failing inputs are
made smaller and kept in build/fuzz. Exit 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutation import Mutator
from targets import TARGETS, Target

KEPT = Path(__file__).resolve().parents[2] / "build" / "fuzz"
LIMIT_S = 2.0
MOST_SHRINKS = 300


def failure_of(target: Target, data: bytes, clock: Callable[[], float] = time.thread_time) -> str:
    """Return how an input fails, "" if it does not."""
    begin = clock()
    try:
        target.check(data)
    except Exception:
        return traceback.format_exc()
    spent = clock() - begin
    return f"the input took {spent:.1f} s of processor time" if spent > LIMIT_S else ""


def shrunk(fails: Callable[[bytes], bool], data: bytes, most: int = MOST_SHRINKS) -> bytes:
    """Return a shorter input that fails, by leaving out pieces."""
    size, tried = len(data) // 2, 0
    while size and tried < most:
        at = 0
        while at < len(data) and tried < most:
            shorter = data[:at] + data[at + size :]
            tried += 1
            if fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def _kind_of(failure: str) -> str:
    """Return the last line of a failure, which names the error."""
    return failure.strip().rpartition("\n")[2]


def _fails_alike(target: Target, kind: str, data: bytes) -> bool:
    return _kind_of(failure_of(target, data)) == kind


def fuzz(
    name: str, target: Target, seed: int, go_on: Callable[[int], bool], keep: Path, say: Callable[[str], None] = print
) -> int:
    """Read inputs while ``go_on(count)``, up to the first failure; return their number, negative after a failure."""
    count = 0
    for data in Mutator(target.corpus(), target.words, seed).inputs():
        if not go_on(count):
            break
        count += 1
        failure = failure_of(target, data)
        if failure:
            small = shrunk(partial(_fails_alike, target, _kind_of(failure)), data)
            keep.mkdir(parents=True, exist_ok=True)
            path = keep / f"{name}-{zlib.crc32(small):08x}"
            path.write_bytes(small)
            say(f"{name}: input {count} of seed {seed} fails:\n{failure}\n{small[:200]!r}")
            say(f"repeat: python -m tests.fuzz {name} --repeat {path}")
            return -count
    return count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[*TARGETS, []], help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--repeat", type=Path, help="read this input alone")
    options = parser.parse_args(arguments)
    failed = False
    for name in options.targets or TARGETS:
        with closing(TARGETS[name]()) as target:
            failed = _run(name, target, options) or failed
    return int(failed)


def _run(name: str, target: Target, options: argparse.Namespace) -> bool:
    """Fuzz one target, or repeat one input; return True after a failure."""
    if options.repeat is not None:
        failure = failure_of(target, options.repeat.read_bytes())
        print(failure or f"{name}: the input does not fail")
        return bool(failure)
    end = time.monotonic() + options.seconds
    count = fuzz(name, target, options.seed, lambda _count: time.monotonic() < end, KEPT)
    print(f"{name}: {abs(count)} inputs, seed {options.seed}, {'FAILED' if count < 0 else 'no failure'}", flush=True)
    return count < 0
