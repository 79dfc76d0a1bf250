"""Registered models without a script, variables, ports and log levels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import free_ports
from remora_adapters import azureml
from support.servers.azure_scripts import PLAIN, environment, wait_until_healthy
from support.servers.hosting import ask, hosted, running, v2_request, write_scale

# -- without a script -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "repository", "outer/repository"])
def test_models_are_found_below_the_registered_folder(tmp_path: Path, inner: str) -> None:
    write_scale(tmp_path / "digits" / "7" / inner / "scale")
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "digits" / "7")}) as port:
        for path in ("/score", "/", "/v2/models/scale/infer"):
            assert ask(port, "POST", path, v2_request([[1, 2, 3, 4]])).json["outputs"][0]["data"] == [2, 4, 6, 8]
        assert ask(port, "GET", "/").body == b"Healthy"
        assert ask(port, "GET", "/score").status == 405


def test_a_bare_model_is_called_what_it_was_registered_as(tmp_path: Path) -> None:
    mounted = tmp_path / "digits" / "7"
    write_scale(mounted)
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(mounted)}) as port:
        assert ask(port, "GET", "/v2/models/digits/ready").status == 200


def test_binary_tensors_and_ids_pass_through_score(tmp_path: Path) -> None:
    write_scale(tmp_path / "m" / "1" / "scale")
    data = np.array([1, 2, 3, 4], np.float32).tobytes()
    spec = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}}).encode()
    told = {"Inference-Header-Content-Length": str(len(header)), "x-ms-client-request-id": "mine"}
    with hosted("azureml", {"AZUREML_MODEL_DIR": str(tmp_path / "m" / "1")}) as port:
        for _ in range(2):
            got = ask(port, "POST", "/score", header + data, told)
            length = int(got.headers["inference-header-content-length"])
            assert np.frombuffer(got.body[length:], np.float32).tolist() == [2, 4, 6, 8]
            assert got.headers["x-ms-client-request-id"] == "mine"


def test_scoring_at_the_root_needs_the_permission_of_score_and_the_probe_needs_none(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    host = azureml.host({"AZUREML_MODEL_DIR": str(tmp_path / "models")})
    locked = replace(host.server, http_restricted_api=("inference:api-key=secret",))
    with running(replace(host, server=locked)) as ports:
        for path in ("/", "/score"):
            assert ask(ports.http, "POST", path, v2_request([[1, 2, 3, 4]])).status == 403
            allowed = ask(ports.http, "POST", path, v2_request([[1, 2, 3, 4]]), {"api-key": "secret"})
            assert allowed.json["outputs"][0]["data"] == [2, 4, 6, 8]
        assert ask(ports.http, "GET", "/").body == b"Healthy"


def test_metrics_are_on_the_one_port_for_those_who_may_see_them(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    host = azureml.host({"AZUREML_MODEL_DIR": str(tmp_path / "models")})
    with running(host) as ports:
        ask(ports.http, "POST", "/score", v2_request([[1, 2, 3, 4]]))
        assert b'nv_inference_request_success{model="scale",version="1"} 1' in ask(ports.http, "GET", "/metrics").body
    locked = replace(host.server, http_restricted_api=("statistics:api-key=secret",))
    with running(replace(host, server=locked)) as ports:
        assert ask(ports.http, "GET", "/metrics").status == 403
        assert ask(ports.http, "GET", "/metrics", headers={"api-key": "secret"}).status == 200


def test_score_with_several_models_says_what_to_do(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_scale(tmp_path / "m" / "1" / name)
    environ = {"AZUREML_MODEL_DIR": str(tmp_path / "m" / "1")}
    with hosted("azureml", environ) as port:
        got = ask(port, "POST", "/score", v2_request([[1, 2, 3, 4]]))
        assert got.status == 404
        assert "REMORA_DEFAULT_MODEL" in got.json["message"]
    with hosted("azureml", {**environ, "REMORA_DEFAULT_MODEL": "b"}) as port:
        assert ask(port, "POST", "/score", v2_request([[1, 2, 3, 4]])).json["model_name"] == "b"


# -- settings ---------------------------------------------------------------------------------------------------------


def test_the_port_is_azures_or_what_it_says() -> None:
    assert azureml.host({}).server.http_port == 5001
    assert azureml.host({"SERVER_PORT": "8080"}).server.http_port == 8080
    assert azureml.host({}).server.http_address == "0.0.0.0"
    for text in ("0", "-1", "x", "9" * 30, "²", "70000", "1" + "0" * 30):
        with pytest.raises(ValueError, match="SERVER_PORT"):
            azureml.host({"SERVER_PORT": text})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HEALTH_PORT", "70000"),
        ("SCORING_TIMEOUT_MS", "1" + "0" * 30),
        ("WORKER_COUNT", "1" + "0" * 30),
        ("AZUREML_LOG_LEVEL", "LOUD"),
        ("AML_CORS_ORIGINS", r"https://.*\.example"),
        ("AML_CORS_ORIGINS", "https://a.example\r\nSet-Cookie: a=b"),
        ("HTTP_X_MS_SERVER_VERSION", "1.0\r\nSet-Cookie: a=b"),
        ("HTTP_X_MS_SERVER_VERSION", "\u7248"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused_by_its_name(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=variable):
        azureml.host({"SEPERATE_HEALTH_ENDPOINT": "true", variable: text})


def test_a_file_says_what_no_variable_does(tmp_path: Path) -> None:
    named = tmp_path / "azure.json"
    named.write_text(
        '{"SERVER_PORT": 8080, "SEPERATE_HEALTH_ENDPOINT": true, "HEALTH_PORT": "8081", "layers": {"a": 1}}'
    )
    host = azureml.host({"AZUREML_CONFIG_FILE": str(named), "HEALTH_PORT": "8082"})
    assert (host.server.http_port, [door.port for door in host.extra_ports]) == (8080, [8082])
    beside = tmp_path / "code" / "config.json"
    beside.parent.mkdir()
    beside.touch()  # an empty one does not count
    environ = {"AML_APP_ROOT": str(tmp_path), "AZUREML_ENTRY_SCRIPT": "code/score.py"}
    assert azureml.host(environ).server.http_port == 5001
    beside.write_text('{"SERVER_PORT": "8083"}')
    assert azureml.host(environ).server.http_port == 8083


@pytest.mark.parametrize("text", ["", "{", "[]", None])
def test_a_file_of_settings_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "azure.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"AZUREML_CONFIG_FILE: .*azure\.json"):
        azureml.host({"AZUREML_CONFIG_FILE": str(path)})


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("", (0, True, True, True)),
        ("DEBUG", (1, True, True, True)),
        ("info", (0, True, True, True)),
        ("WARNING", (0, False, True, True)),
        ("ERROR", (0, False, False, True)),
        ("CRITICAL", (0, False, False, False)),
    ],
)
def test_the_log_has_azures_level(level: str, shown: tuple[int, bool, bool, bool]) -> None:
    server = azureml.host({"AZUREML_LOG_LEVEL": level}).server
    assert (server.log_verbose, server.log_info, server.log_warning, server.log_error) == shown


def test_a_variable_that_does_nothing_here_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"AML_APP_INSIGHTS_ENABLED": "true", "AML_MODEL_DC_STORAGE_ENABLED": "False"}
    with hosted("azureml", environment(tmp_path, PLAIN) | said) as port:
        wait_until_healthy(port)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split()[0] for line in warned] == ["AML_APP_INSIGHTS_ENABLED"]


def test_health_may_have_its_own_port(tmp_path: Path) -> None:
    write_scale(tmp_path / "m" / "1" / "scale")
    variables = {"AZUREML_MODEL_DIR": str(tmp_path / "m" / "1"), "SEPERATE_HEALTH_ENDPOINT": "true"}
    with running(azureml.host(variables)) as ports:
        (health,) = ports.extra
        assert ask(health, "GET", "/").body == b"Healthy"


def test_the_port_for_health_is_not_healthy_before_the_script_is(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"def init():\n    with open({str(gate)!r}) as gate: gate.read()\ndef run(data): return 1\n"
    variables = environment(tmp_path, script) | {"SEPERATE_HEALTH_ENDPOINT": "true"}
    with running(azureml.host(variables)) as ports:
        (health,) = ports.extra
        before = ask(health, "GET", "/")
        gate.write_text("go")  # opening it waits for the script to read
        wait_until_healthy(health)
        assert ask(ports.http, "POST", "/score", {}).json == 1
    assert (before.status, before.json) == (503, {"message": "the scoring script is being loaded"})


def test_it_starts_as_a_module_and_ends_at_sigterm(tmp_path: Path, child_environment: dict[str, str]) -> None:
    (port,) = free_ports(1)
    variables = child_environment | environment(tmp_path, PLAIN) | {"SERVER_PORT": str(port)}
    command = [sys.executable, "-m", "remora_adapters.azureml", "--http-address=127.0.0.1"]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until_healthy(port)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
