"""The log of a server process as JSON: every line of standard error is an object."""

from __future__ import annotations

import json
from pathlib import Path

from live_server import client, free_port, process, until, write_version


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
