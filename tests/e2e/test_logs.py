"""The log of a server process: what it has by default, how a failed start ends, and its form as JSON."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import ssl
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from remora.server.tls import make_self_signed
from support.process.eventually import eventually
from support.servers.live_server import MODEL, ask, client, free_port, process, replace, until, write_version


def test_every_line_of_a_json_log_is_an_object_from_the_start_to_the_end(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    repository = tmp_path / "models"
    write_version(repository, 1)
    port = free_port()
    flags = ("--log-format=json", "--model-control-mode=explicit", "--load-model=m")
    with process(repository, port, child_environment, *flags) as server:
        until(port, "/v2/health/ready", server)
        for action in ("load", "unload", "load"):
            with client(port) as connection:
                connection.request("POST", f"/v2/repository/models/m/{action}")
                assert connection.getresponse().status == 200
        (repository / "m" / "1" / "model.py").write_text("raise RuntimeError('broken')")
        with client(port) as connection:
            connection.request("POST", "/v2/repository/models/m/load", b'{"parameters":{}}')
            connection.getresponse().read()
        server.terminate()
        _, text = server.communicate(timeout=60)
    lines = [json.loads(line) for line in text.splitlines()]
    ready = next(line for line in lines if line["message"].startswith("READY"))
    assert [(model["model"], model["version"]) for model in ready["models"]] == [("m", "1")]
    unloaded = [line for line in lines if "unloaded" in line["message"]]
    assert (unloaded[0]["model"], unloaded[0]["version"]) == ("m", "1")
    failed = [line for line in lines if line["severity"] == "ERROR"]
    assert failed
    assert all(line["model"] == "m" for line in failed)


STAMP = re.compile(r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8},[0-9]{3} (.*)")


def messages(text: str) -> list[str]:
    """Return the lines of a text log without their times, and without numbers that differ from run to run."""
    lines = [found[1] for found in map(STAMP.match, text.splitlines()) if found is not None]
    return [re.sub(r"[0-9]+ ms", "N ms", line) for line in lines]


def test_loads_swaps_unloads_and_failures_are_a_line_each(tmp_path: Path, child_environment: dict[str, str]) -> None:
    repository, port = tmp_path / "models", free_port()
    write_version(repository, 1)
    flags = ("--model-control-mode=explicit", "--load-model=m")
    with process(repository, port, child_environment, *flags) as server, client(port) as connection:
        until(port, "/v2/health/ready", server)

        def change(action: str) -> None:
            connection.request("POST", f"/v2/repository/models/m/{action}")
            assert connection.getresponse().read() == b""

        write_version(repository, 2)
        change("load")
        change("unload")
        change("load")
        failing = MODEL.format(factor=2, initialize="pass").replace(
            "arrays = [", "raise ValueError('a\\nb')\n        a = ["
        )
        (repository / "m" / "2" / "model.py").write_text(failing)
        change("load")
        for value in range(20):
            assert ask(connection, value)[0] == 500
        change("unload")
        server.terminate()
        _, text = server.communicate(timeout=60)
    model = repository / "m" / "2" / "model.py"
    place = f"{model}({failing.splitlines().index(next(row for row in failing.splitlines() if 'raise' in row)) + 1})"
    assert [line for line in messages(text) if "remora.models" in line] == [
        "I remora.models: model 'm': version 2 loaded in N ms, version 1 retired (a client asked for it)",
        "I remora.models: model 'm': version 2 unloaded (a client asked for it)",
        "I remora.models: model 'm': version 2 loaded in N ms (a client asked for it)",
        "I remora.models: model 'm': version 2 loaded in N ms, version 2 retired (a client asked for it)",
        "W remora.models: model 'm' failed a request: Failed to process the request(s) for model 'm_0', message: "
        f"ValueError: a ... {place}: execute",
        "I remora.models: model 'm': version 2 unloaded (a client asked for it)",
    ]
    assert text.count("READY after") == 1
    assert len(set(text.splitlines())) == len(text.splitlines())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_a_renewed_certificate_and_a_damaged_one_are_a_line_each_with_front_processes(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """Each process follows the files; all but one log them at the debug level."""
    write_version(tmp_path / "models", 1)
    cert, key = make_self_signed(tmp_path)
    pair = (f"--http-server-cert={cert}", f"--http-server-key={key}")
    flags = ("--frontends=2", "--log-format=json", "--log-verbose=1", *pair)
    text = b""
    trust = ssl.create_default_context(cafile=str(cert))
    port = free_port()
    with process(tmp_path / "models", port, child_environment, *flags) as server, ExitStack() as connections:
        assert server.stderr is not None
        log = server.stderr.fileno()

        def severities(words: bytes) -> list[str]:
            nonlocal text
            if select.select([log], [], [], 0)[0]:
                text += os.read(log, 1 << 20)
            whole, _, _ = text.rpartition(b"\n")
            return sorted(json.loads(line)["severity"] for line in whole.splitlines() if words in line)

        eventually(lambda: severities(b"READY after"), process=server)
        for _ in range(2):  # one for each front, which follows the files from then on
            plain = connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connections.enter_context(trust.wrap_socket(plain, server_hostname="localhost"))
        os.utime(cert, ns=(1, 1))
        renewed = eventually(lambda: found if len(found := severities(b"that is now in")) == 3 else None)
        replace(cert, "damaged")
        failed = eventually(lambda: found if len(found := severities(b"stays as it was")) == 3 else None)
    assert (renewed, failed) == (["DEBUG", "DEBUG", "INFO"], ["DEBUG", "DEBUG", "ERROR"])


STARTS = {
    "a model that cannot be loaded": ((), "'bad' could not be loaded; --exit-on-error=false serves the models that "),
    "a file of keys that does not exist": (("--api-keys-file=/none/keys",), "--api-keys-file=/none/keys: No such file"),
    "a certificate that does not exist": (
        ("--http-server-cert=/none/cert", "--http-server-key=/none/key"),
        "'/none/key' cannot be read (No such file or directory)",
    ),
    "a port that is in use": (("--http-port=IN_USE",), "Address already in use; is another server there? Choose"),
    "a flag with a wrong value": (("--http-max-input-size=0",), "--http-max-input-size=0: expected more than 0 bytes"),
    "a folder that does not exist": (
        ("--model-repository=/none/models",),
        "failed to open model repository '/none/models': it is not",
    ),
}


@pytest.mark.parametrize("form", ["default", "json"])
@pytest.mark.parametrize("name", STARTS)
def test_a_failed_start_ends_with_its_error(
    tmp_path: Path, child_environment: dict[str, str], name: str, form: str
) -> None:
    flags, reason = STARTS[name]
    write_version(tmp_path / "models", 1, name="good")
    if not flags:
        write_version(tmp_path / "models", 1, name="bad", initialize="raise ValueError('no good')")
    with closing(socket.create_server(("127.0.0.1", 0))) as used:
        words = [flag.replace("IN_USE", str(used.getsockname()[1])) for flag in flags]
        with process(tmp_path / "models", free_port(), child_environment, f"--log-format={form}", *words) as server:
            assert server.stderr is not None
            text = server.stderr.read()
            assert server.wait(60) == 1
    last = text.splitlines()[-1]
    assert reason in last
    assert text.count(reason) == 1
    assert "Traceback" not in text
    assert "READY" not in text
