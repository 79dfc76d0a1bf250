"""Knative and Cloud Run: the platform's port, all on it, requests that wait for a cold start, none lost at the end."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import free_ports
from remora_adapters import azureml, cloud_run, knative, kserve, sagemaker, vertex
from remora_deploy.emulate import grpc_health
from remora_deploy.emulate.asking import Address
from support.process.eventually import eventually
from support.servers.hosting import PATIENCE_S, ask, hosted, v2_request, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

ROWS = [[1.0, 2.0, 3.0, 4.0]]
DOUBLED = [2.0, 4.0, 6.0, 8.0]
NOBODY = 10_001
BOTH = pytest.mark.parametrize("adapter", [knative, cloud_run], ids=["knative", "cloud_run"])


@BOTH
def test_the_port_is_the_platforms(adapter: ModuleType) -> None:
    assert adapter.host({"PORT": "3000"}).server.http_port == 3000
    assert adapter.host({}).server.http_port == 8080
    assert adapter.host({}).server.http_address == "0.0.0.0"
    for text in ("", "x", "0", "65536", "-1", "80800000"):
        with pytest.raises(ValueError, match="PORT"):
            adapter.host({"PORT": text})


@pytest.mark.parametrize("port", ["8008", "8012", "8013", "8022", "9090", "9091"])
def test_ports_of_the_queue_proxy_are_refused(port: str) -> None:
    with pytest.raises(ValueError, match="reserved by Knative"):
        knative.host({"PORT": port})


@BOTH
def test_nothing_has_a_port_beside_the_one_that_rest_and_grpc_share(adapter: ModuleType) -> None:
    server = adapter.host({}).server
    assert (server.allow_http, server.grpc_on_http_port) == (True, True)
    assert (server.allow_grpc, server.allow_metrics) == (False, False)


def test_the_end_fits_into_each_platforms_grace(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("def init(): pass\ndef run(data): pass\n")
    for adapter, environ, grace_s in (
        (knative, {}, 300),
        (cloud_run, {}, 10),
        (azureml, {}, 30),
        (azureml, {"AML_APP_ROOT": str(tmp_path)}, 30),
        (kserve, {}, 30),
        (sagemaker, {"SAGEMAKER_MULTI_MODEL": "true"}, 30),
        (vertex, {}, 30),
    ):
        host = adapter.host(environ)
        spent_s = host.server.lame_duck_secs + host.engine.exit_timeout_secs
        assert spent_s < grace_s or (adapter is knative and spent_s == grace_s), adapter
    for adapter in (knative, kserve):  # whose routers go on sending
        assert adapter.host({}).server.lame_duck_secs >= 5


@pytest.mark.parametrize("platform", ["knative", "cloud_run"])
def test_rest_health_metrics_and_grpc_are_on_the_one_port(platform: str, tmp_path: Path) -> None:
    write_scale(tmp_path / "scale")
    with hosted(platform, {"REMORA_MODEL_REPOSITORY": str(tmp_path)}) as port:
        assert ask(port, "GET", "/v2/health/ready").status == 200
        answer = ask(port, "POST", "/v2/models/scale/infer", v2_request(ROWS))
        assert answer.json["outputs"][0]["data"] == DOUBLED
        for path in ("/metrics", "/v2/metrics"):
            assert b'nv_inference_request_success{model="scale"' in ask(port, "GET", path).body or path != "/metrics"
        assert grpc_health.check(Address("127.0.0.1", port), PATIENCE_S) == ""


def test_probes_are_counted_as_no_requests(tmp_path: Path) -> None:
    write_scale(tmp_path / "scale")

    def counted(port: int) -> list[str]:
        page = ask(port, "GET", "/metrics").body.decode()
        return [line for line in page.splitlines() if line.startswith("nv_inference")]

    with hosted("knative", {"REMORA_MODEL_REPOSITORY": str(tmp_path)}) as port:
        ask(port, "POST", "/v2/models/scale/infer", v2_request(ROWS))
        before = counted(port)
        assert before
        for agent in ("kube-probe/1.32", "Knative-Activator-Probe", "Knative-Queue-Proxy-Probe"):
            for path in ("/v2/health/ready", "/v2/health/live", "/readyz", "/livez", "/v2/models/scale/ready"):
                assert ask(port, "GET", path, headers={"User-Agent": agent, "K-Network-Probe": "queue"}).status == 200
        assert grpc_health.check(Address("127.0.0.1", port), PATIENCE_S) == ""
        assert counted(port) == before


# -- as a process, as the platform runs it ----------------------------------------------------------------------------

SLOW = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        open({gate!r}).close()

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]

    @staticmethod
    def auto_complete_config(config):
        config.add_input({{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}})
        config.add_output({{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}})
        return config
"""


def start(module: str, port: int, models: Path, log: Path, **more: Any) -> subprocess.Popen[bytes]:
    """The adapter's process with the platform's environment and nothing else of ours."""
    root = Path(__file__).resolve().parents[2]
    environment = {
        "PORT": str(port),
        "PYTHONPATH": f"{root / 'core'}:{root / 'adapters'}",
        "REMORA_MODEL_REPOSITORY": str(models),
        "K_SERVICE": "digits",
        "TMPDIR": str(log.parent),
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-B", "-m", f"remora_adapters.{module}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **more,
        )


def probe(process: subprocess.Popen[bytes], port: int, log: Path, path: str = "/v2/health/ready") -> None:
    """Ask every 25 ms, as the queue proxy does, until the answer is good."""
    eventually(lambda: ask(port, "GET", path).status == 200, process=process, log=log, pause_s=0.025)


def test_requests_before_the_model_is_there_wait_for_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "models" / "slow" / "1").mkdir(parents=True)
    (tmp_path / "models" / "slow" / "1" / "model.py").write_text(SLOW.format(gate=str(gate)))
    (port,) = free_ports(1)
    log = tmp_path / "log.txt"
    process = start("knative", port, tmp_path / "models", log)
    try:
        probe(process, port, log, "/v2/health/live")
        assert ask(port, "GET", "/v2/health/ready").status != 200
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3.0]}]}
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(ask(port, "POST", "/v2/models/slow/infer", body)))
        asking.start()
        gate.write_text("")  # opening it waits for the model, and lets it go on
        asking.join()
        assert answers[0].json["outputs"][0]["data"] == [3.0]
    finally:
        process.kill()
        process.wait()


def health(port: int) -> str:
    return grpc_health.check(Address("127.0.0.1", port), PATIENCE_S)


def serves_on(port: int) -> bool:
    """Whether it says that it does not serve, and answers all the same."""
    with suppress(OSError, http.client.HTTPException):  # the server has ended
        answered = ask(port, "POST", "/v2/models/scale/infer", v2_request(ROWS)).status == 200
        return answered and health(port).startswith("the health service answered")
    return False


def test_requests_after_sigterm_are_answered_until_the_end(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    (port,) = free_ports(1)
    log = tmp_path / "log.txt"
    process = start("knative", port, tmp_path / "models", log)
    try:
        probe(process, port, log)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while health(port) == "":  # it has not heard yet
            pass
        while serves_on(port):
            pass
        assert time.monotonic() - begin > 4
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_cloud_run_ends_well_within_its_ten_seconds(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    (port,) = free_ports(1)
    process = start("cloud_run", port, tmp_path / "models", tmp_path / "log.txt")
    try:
        probe(process, port, tmp_path / "log.txt")
        idle = http.client.HTTPConnection("127.0.0.1", port)
        idle.request("GET", "/v2/health/live")
        idle.getresponse().read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, "its own limits have ended it"
        idle.close()
    finally:
        process.kill()
        process.wait()


def test_models_of_a_mounted_folder_are_served_in_place(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    (tmp_path / "scratch").mkdir()
    log = tmp_path / "scratch" / "log.txt"
    (port,) = free_ports(1)
    process = start("cloud_run", port, tmp_path / "models", log)
    try:
        probe(process, port, log)
        assert ask(port, "POST", "/v2/models/scale/infer", v2_request(ROWS)).status == 200
        eventually(lambda: list((tmp_path / "scratch").rglob("*")) == [log])  # Python tries the folder for a moment
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process as nobody")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
def test_nobody_serves_with_a_root_that_is_read_only_but_for_tmp(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "scale")
    (port,) = free_ports(1)
    root = Path(__file__).resolve().parents[2]
    sandbox = ["bwrap", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp"]
    sandbox += ["--ro-bind", str(tmp_path / "models"), "/tmp/models"]
    for needed in (root, Path(sys.prefix)):  # which may lie below /tmp, as a checkout of CI does
        sandbox += ["--ro-bind", str(needed), str(needed)]
    sandbox += ["--proc", "/proc", "--dev", "/dev", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    sandbox += ["--clearenv", "--setenv", "PORT", str(port), "--setenv", "REMORA_MODEL_REPOSITORY", "/tmp/models"]
    sandbox += ["--setenv", "PYTHONPATH", f"{root / 'core'}:{root / 'adapters'}", "--chdir", "/"]
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*sandbox, sys.executable, "-m", "remora_adapters.knative"], stdout=output, stderr=output
        )
    try:
        probe(process, port, log)
        assert ask(port, "POST", "/v2/models/scale/infer", v2_request(ROWS)).status == 200
    finally:
        process.terminate()
        process.wait()
