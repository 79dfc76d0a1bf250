"""Files of lines: sizes, full disks, and redactions."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.errors import ConfigError
from remora.messages import InferForm
from remora_tools.traffic.line_file import LineFile, hidden_in, hides_all, parameters_of, redactions_of


def _file(path: Path, most: int, full: list[bool]) -> LineFile[bytes]:
    return LineFile(path, most, lambda each: each, lambda: full.append(True), "--option")


def test_lines_are_appended_until_one_does_not_fit(tmp_path: Path) -> None:
    full: list[bool] = []
    (tmp_path / "f").write_bytes(b"old\n")
    file = _file(tmp_path / "f", 12, full)
    file.write([b"one\n", b"two\n", b"three\n"])
    assert ((tmp_path / "f").read_bytes(), full) == (b"old\none\ntwo\n", [True])
    file.close()


def test_a_line_that_is_written_in_part_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _file(tmp_path / "f", 100, [])
    file.write([b"whole\n"])
    inner = file._file

    class Full:
        """File on a disk with room for three bytes."""

        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def write(self, data: bytes) -> int:
            return inner.write(data[:3])

    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(OSError, match="No space left"):
        file.write([b"second\n"])
    monkeypatch.undo()
    file.write([b"third\n"])
    file.close()
    assert (tmp_path / "f").read_bytes() == b"whole\nthird\n"


def test_a_file_that_cannot_be_opened_is_reported_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--option="):
        _file(tmp_path / "absent" / "f", 1, [])


def test_only_the_owner_reads_a_new_file_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o644)
    for name in ("old", "new"):
        _file(tmp_path / name, 1, []).close()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("old", "new")] == [0o644, 0o600]


def test_parameters_are_kept_without_headers_that_hold_secrets() -> None:
    secrets = dict.fromkeys(("X-API-Key", "Authorization", "cookie", "Proxy-Authorization"), "s3cret")
    form = InferForm((), parameters={**secrets, "x-trace": "1"}, priority=2)
    assert parameters_of(form) == {"x-trace": "1", "priority": 2}
    assert parameters_of(form, custom=False) == {"priority": 2}


def test_redactions_name_models_and_their_tensors() -> None:
    redactions = redactions_of(["a:x,y", "*"])
    assert [hidden_in(redactions, "a")(name) for name in "xyz"] == [True, True, False]
    assert hidden_in(redactions, "b")("x")
    assert not hidden_in({}, "b")("x")
    assert [hides_all(redactions, name) for name in ("a", "b")] == [False, True]
    assert not hides_all({}, "b")
