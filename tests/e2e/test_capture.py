"""Requests that a server captures, sent again to a server by `remora replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remora.cli import main
from support.process.eventually import eventually
from support.servers.live_server import ask, client, free_port, process, until, write_version


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_captured_requests_are_repeated_and_another_version_differs(
    tmp_path: Path,
    child_environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_version(tmp_path / "models", 2)
    write_version(tmp_path / "other", 3)
    captured, port = tmp_path / "captured.jsonl", free_port()
    with process(tmp_path / "models", port, child_environment, f"--capture={captured}") as server:
        until(port, "/readyz", server)
        with client(port) as connection:
            assert [ask(connection, value)[0] for value in (1, 2, 3)] == [200, 200, 200]
        eventually(lambda: len(lines(captured)) == 3, process=server)
        first = lines(captured)[0]
        assert (first["model"], first["error"]) == ("m", "")
        assert first["inputs"] == [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}]
        assert first["answers"] == [[{"name": "OUT", "datatype": "INT32", "shape": [1, 1], "data": [2]}]]
        assert main(["replay", str(captured), "--against", f"http://127.0.0.1:{port}"]) == 0
        assert "3 answers are the same" in capsys.readouterr().out
        profiles = tmp_path / "profiles.toml"
        profiles.write_text(f'[staging]\nurl = "http://127.0.0.1:{port}"\n')
        monkeypatch.setenv("REMORA_PROFILES", str(profiles))
        assert main(["replay", str(captured), "--profile", "staging", "--most", "3"]) == 0
        assert "3 answers are the same" in capsys.readouterr().out
    port = free_port()
    with process(tmp_path / "other", port, child_environment) as server:
        until(port, "/readyz", server)
        assert main(["replay", str(captured), "--against", f"http://127.0.0.1:{port}", "--most", "3"]) == 1
        assert "output 'OUT': 1 of 1 elements differ, first [0]: 3 instead of 2" in capsys.readouterr().out
        assert (
            main(["replay", str(captured), "--against", f"http://127.0.0.1:{port}", "--most", "3", "--absolute=9"]) == 1
        )


def test_what_cannot_be_replayed_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    assert main(["replay", str(broken), "--against", "http://127.0.0.1:1"]) == 2
    assert f"{broken}:1: not a captured request" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none"), "--against", "http://127.0.0.1:1"]) == 2
    assert "cannot be read" in capsys.readouterr().err
