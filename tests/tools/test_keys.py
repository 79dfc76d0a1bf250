"""`remora keys`: a file of keys from its first key to the last."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from remora.cli import main
from remora.protocols.api_keys import Keys, read_entries


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main(["keys", *words])
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_new_key_is_printed_once_on_the_last_line_and_only_its_hash_is_kept(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(capsys, "new", "--file", str(file), "--name", "ci", "--role", "infer", "--role", "read")
    key = lines[-1]
    assert code == 0
    assert key.startswith("rk_")
    assert len(key) == 46
    assert key not in file.read_text()
    caller = Keys(read_entries(file.read_text())).find(key.encode())
    assert caller is not None
    assert (caller.name, caller.roles) == ("ci", ("infer", "read"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_are_listed_and_revoked_by_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, limits in (("ann", ()), ("bob", ("--rate=5", "--concurrent=2"))):
        assert run(capsys, "new", "--file", str(file), "--name", name, "--role", "all", *limits)[0] == 0
    file.chmod(0o640)
    code, lines = run(capsys, "list", "--file", str(file))
    rows = [line.split() for line in lines]
    assert (code, [row[:2] for row in rows]) == (0, [["NAME", "ROLES"], ["ann", "all"], ["bob", "all"]])
    assert [row[3:] for row in rows[1:]] == [["-", "-", "-"], ["5", "-", "2"]]
    assert run(capsys, "revoke", "--file", str(file), "--name", "ann")[0] == 0
    assert [each["name"] for each in json.loads(file.read_text())["keys"]] == ["bob"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [each.name for each in file.parent.iterdir()] == ["keys.json"]


def test_a_link_to_the_file_stays_a_link(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = file.with_name("link.json")
    assert run(capsys, "new", "--file", str(file), "--name", "ann", "--role", "all")[0] == 0
    link.symlink_to(file)
    assert run(capsys, "new", "--file", str(link), "--name", "bob", "--role", "all")[0] == 0
    assert link.is_symlink()
    assert len(read_entries(file.read_text())) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("new", "--name", "ann", "--role", "all"), "has a key 'ann'"),
        (("new", "--name", "a b", "--role", "all"), "not the name of a key"),
        (("revoke", "--name", "eve"), "has no key 'eve'; it has ann"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(
    file: Path, words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "new", "--file", str(file), "--name", "ann", "--role", "all")[0] == 0
    before = file.read_bytes()
    code, lines = run(capsys, words[0], "--file", str(file), *words[1:])
    assert (code, len(lines)) == (2, 1)
    assert reason in lines[0]
    assert file.read_bytes() == before


def test_a_file_that_is_none_is_not_overwritten(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("precious")
    code, lines = run(capsys, "new", "--file", str(file), "--name", "ann", "--role", "all")
    assert code == 2
    assert "not JSON" in lines[-1]
    assert file.read_text() == "precious"
