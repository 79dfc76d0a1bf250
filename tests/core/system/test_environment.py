"""Where caches go when home is not there or may not be written."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from remora.errors import UnavailableError
from remora.system.environment import boot_id, cache_directory, keep_runtimes_quiet


def test_a_cache_goes_where_xdg_says(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "x"), "HOME": str(tmp_path)}
    assert cache_directory("models", environ) == tmp_path / "x" / "remora" / "models"
    assert cache_directory("models", {"HOME": str(tmp_path)}) == tmp_path / ".cache" / "remora" / "models"


@pytest.mark.parametrize("home", ["", "/proc/none", "relative"])
def test_without_a_home_that_can_be_written_it_goes_to_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_directory("models", {"HOME": home})
    assert folder.is_relative_to(tmp_path)
    assert folder.is_dir()


def test_without_any_place_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match="no writable cache folder"):
        cache_directory("models", {})


def test_a_boot_has_a_name_where_the_system_gives_one(tmp_path: Path) -> None:
    assert boot_id(tmp_path) == ""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("abc\n")
    assert boot_id(tmp_path) == "abc"


def test_runtimes_send_nothing_unless_the_operator_allows_it() -> None:
    quiet: dict[str, str] = {}
    keep_runtimes_quiet(quiet)
    assert quiet == {"ORT_DISABLE_TELEMETRY": "1", "ORT_TELEMETRY_DISABLED": "1"}
    said = {"ORT_DISABLE_TELEMETRY": "0"}
    keep_runtimes_quiet(said)
    assert said["ORT_DISABLE_TELEMETRY"] == "0"


def test_onnx_runtime_writes_nothing_into_a_home_when_it_is_quiet(tmp_path: Path) -> None:
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed: pip install '.[onnx]'")
    ours = ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = "from remora.system.environment import keep_runtimes_quiet; keep_runtimes_quiet(); import onnxruntime"
    subprocess.run([sys.executable, "-B", "-c", program], env=environment, check=True)
    assert not list(tmp_path.iterdir())
