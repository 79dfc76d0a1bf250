"""API keys of a real server: made, used by the command line, revoked while it runs, and never shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import free_ports
from remora.proto import inference_pb2 as pb
from support.process.eventually import eventually
from support.servers.hosting import ask
from support.servers.live_server import PATIENCE_S, free_port, process, until, write_version

REQUEST = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [2]}]}
FRONTS = pytest.param("--frontends=2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))


def remora(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "remora", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_a_key_is_made_used_and_revoked_while_the_server_runs(
    fronts: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    repository, file, port = tmp_path / "models", tmp_path / "keys.json", free_port()
    repository.mkdir()
    write_version(repository, 3)

    def make(name: str, role: str) -> str:
        made = remora(child_environment, "keys", "new", "--file", str(file), "--name", name, "--role", role)
        assert made.returncode == 0, made.stderr
        return made.stdout.splitlines()[-1]

    def status(key: str) -> int:
        return ask(port, "POST", "/v2/models/m/infer", REQUEST, {"X-API-Key": key}).status

    first = make("first", "infer")
    flags = (fronts, f"--api-keys-file={file}", "--log-verbose=1", "--access-log=all")
    with process(repository, port, child_environment, *flags) as server:
        until(port, "/readyz", server)
        assert ask(port, "POST", "/v2/models/m/infer", REQUEST).status == 401
        assert status(first) == 200
        second = make("second", "all")
        eventually(lambda: status(second) == 200, process=server)
        assert status(first) == 200
        url = f"--url=http://127.0.0.1:{port}"
        known = {**child_environment, "REMORA_API_KEY": second}
        # Each front notices the new key by itself, within a second.
        eventually(lambda: "m" in remora(known, "models", "list", url).stdout, process=server)
        refused = remora({**child_environment, "REMORA_API_KEY": first}, "models", "list", url)
        assert refused.returncode == 1
        assert "the API key 'first' has the role infer" in refused.stderr
        assert "REMORA_API_KEY" in remora(child_environment, "models", "list", url).stderr
        assert remora(child_environment, "keys", "revoke", "--file", str(file), "--name", "first").returncode == 0
        eventually(lambda: status(first) == 401, process=server)
        assert status(second) == 200
        lines = Path(f"/proc/{server.pid}/cmdline").read_text() if Path("/proc").exists() else ""
        server.terminate()
        said = server.communicate(timeout=PATIENCE_S)[1]
    lines_of_log = [line for line in said.splitlines() if "/v2/models/m/infer" in line]
    assert any(" 200 " in line and "first" in line for line in lines_of_log), said
    for key in (first, second):
        assert key not in said + lines + file.read_text()


def test_a_key_from_the_environment_is_in_no_process_list(tmp_path: Path, child_environment: dict[str, str]) -> None:
    repository, port = tmp_path / "models", free_port()
    repository.mkdir()
    write_version(repository, 3)
    environment = {**child_environment, "CI_KEY": "a secret of ours"}
    with process(repository, port, environment, "--api-key=ci:infer=@env:CI_KEY") as server:
        until(port, "/readyz", server)
        for key, wanted in (("a secret of ours", 200), ("another", 401)):
            got = ask(port, "POST", "/v2/models/m/infer", REQUEST, {"Authorization": f"Bearer {key}"})
            assert got.status == wanted
        if Path("/proc").exists():
            assert b"a secret of ours" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_a_key_in_the_command_line_is_refused_and_not_repeated(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    said = remora(child_environment, "serve", str(tmp_path), "--api-key=ci:infer=hunter2")
    assert said.returncode == 1
    assert "the process list would show the key" in said.stderr
    assert "hunter2" not in said.stderr


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's process list")
@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_a_secret_in_the_command_line_is_not_in_the_process_list(
    fronts: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    repository, port = tmp_path / "models", free_port()
    repository.mkdir()
    write_version(repository, 3)
    flags = (fronts, "--http-restricted-api=inference:key=hunter2", "--grpc-restricted-protocol=health:key=hunter3")
    with process(repository, port, child_environment, *flags) as server:
        until(port, "/readyz", server)
        assert ask(port, "POST", "/v2/models/m/infer", REQUEST).status == 403
        assert ask(port, "POST", "/v2/models/m/infer", REQUEST, {"key": "hunter2"}).status == 200
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (server.pid, *children)]
    assert b"inference:key=*******" in lines[0]
    assert not any(b"hunter" in line for line in lines)


PARAMETERS_CONFIG = """
backend: "python" max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: [ 1, 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
PARAMETERS_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [np.array([request.parameters()], np.object_) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]) for text in texts]
"""


@pytest.mark.parametrize("flag", ["--frontends=0", FRONTS, "--grpc-transport=grpcio"])
def test_a_key_is_not_forwarded_to_models_or_captures(
    flag: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
    folder, file, kept = tmp_path / "models" / "m", tmp_path / "keys.json", tmp_path / "captured.jsonl"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(PARAMETERS_CONFIG)
    (folder / "1" / "model.py").write_text(PARAMETERS_MODEL)
    made = remora(child_environment, "keys", "new", "--file", str(file), "--name", "ci", "--role", "infer")
    key = made.stdout.splitlines()[-1]
    port, grpc_port = free_ports(2)
    patterns = ("--http-header-forward-pattern=x-|auth", "--grpc-header-forward-pattern=.*")
    ports = ("--allow-grpc=true", f"--grpc-port={grpc_port}")
    flags = (flag, f"--api-keys-file={file}", f"--capture={kept}", *patterns, *ports)
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="IN", shape=[1, 1], datatype="INT32").contents.int_contents.append(2)
    with process(folder.parent, port, child_environment, *flags) as server:
        until(port, "/readyz", server)
        over_http = [
            ask(port, "POST", "/v2/models/m/infer", REQUEST, {**headers, "X-Trace": "http"})
            for headers in ({"X-API-Key": key}, {"Authorization": f"Bearer {key}"})
        ]
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            metadata = (("authorization", f"Bearer {key}"), ("x-trace", "grpc"))
            once = infer(message.SerializeToString(), metadata=metadata, timeout=PATIENCE_S)
            (streamed,) = stream(iter([message.SerializeToString()]), metadata=metadata, timeout=PATIENCE_S)
        server.terminate()
        server.communicate(timeout=PATIENCE_S)
    for answer in over_http:
        assert answer.status == 200, answer
        assert b"X-Trace" in answer.body
    lines = kept.read_text()
    assert lines.count('"x-trace":"grpc"') == 2
    assert not any(key.encode() in each for each in (*(got.body for got in over_http), once, streamed, lines.encode()))
    assert all(b"x-trace" in each for each in (once, streamed))
    assert kept.stat().st_mode & 0o777 == 0o600
