"""Environments on disk: made once, kept while in use, removed when the cache is full."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from remora.environments.cache import EnvironmentCache
from remora.errors import InternalError


def filled(size: int = 10) -> Any:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * size)

    return make


def test_an_environment_is_made_once_by_however_many_threads_ask(tmp_path: Path) -> None:
    cache, made = EnvironmentCache(tmp_path / "c", 1000), list[Path]()

    def make(folder: Path) -> None:
        made.append(folder)
        filled()(folder)

    threads = [threading.Thread(target=cache.folder_for, args=("key", make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [tmp_path / "c" / "key"]


def test_what_was_left_half_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir(parents=True)
    (tmp_path / "key" / "rubbish").touch()
    folder = EnvironmentCache(tmp_path, 1000).folder_for("key", filled())
    assert not (folder / "rubbish").exists()


def test_a_make_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    cache = EnvironmentCache(tmp_path, 1000)

    def broken(folder: Path) -> None:
        filled()(folder)
        raise InternalError("no")

    with pytest.raises(InternalError, match="no"):
        cache.folder_for("key", broken)
    assert not (tmp_path / "key").exists()
    assert cache.folder_for("key", filled()).is_dir()


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from remora.environments.cache import EnvironmentCache
def make(folder):
    folder.mkdir()
    (folder / "file").write_bytes(b"x" * 10)
EnvironmentCache(Path(sys.argv[1]), 1000).folder_for(sys.argv[2], make)
print("made", flush=True)
sys.stdin.read()
"""


def test_the_least_recently_used_go_first_and_what_any_process_uses_stays(tmp_path: Path) -> None:
    keys = ("old", "used", "newer")
    core = Path(__file__).parents[3] / "core"
    children = {
        key: subprocess.Popen(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path), key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(core)},
        )
        for key in keys
    }
    for child in children.values():
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
    for number, key in enumerate(("used", "old", "newer")):
        os.utime(tmp_path / key / ".remora-complete", ns=(number, number))
    for key in ("old", "newer"):
        children[key].communicate()
    EnvironmentCache(tmp_path, 35).folder_for("latest", filled())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["latest", "newer", "used"]
    children["used"].communicate()


def test_a_cache_that_cannot_be_written_says_which_setting_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InternalError, match="environment-cache-directory=DIR"):
        EnvironmentCache(tmp_path / "file" / "cache", 10).folder_for("key", filled())
