"""`make mutants`: plants one mistake after another in the deciders and runs the tests that must notice.

    python -m tests.mutants [words of a mutant's file ...] [--workers 2]

Each mutant runs in a copy of the tree. Killed: its tests fail, or do not end. Lived: they pass, and the table says
which mistake no test would notice. Broken: it cannot even be imported, or its text is not there exactly once. Exit 1
unless all are killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parent))
from table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("core", "docs", "tests", "pyproject.toml")
LIMIT_S = 300
KILLED, LIVED, BROKEN = "killed", "LIVED", "BROKEN"
_TESTS_FAILED = 1  # pytest's own exit codes
_NOTHING_WRONG = 0


def copy_of_the_tree(folder: Path) -> Path:
    """What a test run needs, copied."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "oracle", "bench"))
        else:
            shutil.copy(source, folder / name)
    return folder


def run_tests(tree: Path, tests: tuple[str, ...]) -> int:
    """pytest's exit code; that of failed tests when they do not end."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=40",
        "--timeout-method=thread",
        *tests,
    ]
    environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".hypothesis")}
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return _TESTS_FAILED


def fate_of(mutant: Mutant, tree: Path) -> str:
    """Plant one mutant, see what becomes of it, and put the tree right again."""
    file = tree / mutant.path
    source = file.read_text()
    if source.count(mutant.original) != 1:
        return BROKEN
    file.write_text(source.replace(mutant.original, mutant.replacement))
    try:
        return {_NOTHING_WRONG: LIVED, _TESTS_FAILED: KILLED}.get(run_tests(tree, mutant.tests), BROKEN)
    finally:
        file.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants of files whose names have one of these in them")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    chosen = [row for row in MUTANTS if not options.words or any(word in row.file for word in options.words)]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.workers):
            trees.put(copy_of_the_tree(Path(folder) / f"tree{number}"))

        def in_a_tree(work: object, *arguments: object) -> object:
            tree = trees.get()
            try:
                return work(*arguments, tree)  # type: ignore[operator]
            finally:
                trees.put(tree)

        suites = sorted({row.tests for row in chosen})
        codes = list(pool.map(lambda tests: in_a_tree(lambda tests, tree: run_tests(tree, tests), tests), suites))
        for tests, code in zip(suites, codes, strict=True):
            if code != _NOTHING_WRONG:
                print(f"without any mutant these tests fail already: {' '.join(tests)}")
                return 1
        fates = []
        for mutant, fate in zip(chosen, pool.map(lambda row: in_a_tree(fate_of, row), chosen), strict=True):
            print(f"{fate:6}  {mutant.file}: {mutant.original!r} -> {mutant.replacement!r}", flush=True)
            fates.append(fate)
    for file in dict.fromkeys(row.file for row in chosen):
        here = [fate for row, fate in zip(chosen, fates, strict=True) if row.file == file]
        print(f"{file}: {here.count(KILLED)} of {len(here)} killed")
    print(f"{fates.count(KILLED)} of {len(fates)} killed in {time.perf_counter() - begin:.0f} s")
    return 0 if fates.count(KILLED) == len(fates) else 1


if __name__ == "__main__":
    sys.exit(main())
