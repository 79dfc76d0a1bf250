"""A server that gets SIGTERM amid the streams of a language model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from support.models.generation_models import tiny
from support.servers.live_server import PATIENCE_S, client, free_port, process, until

BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 450, "temperature": 0, "ignore_eos": True, "stream": True}
HANGING = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
"""
# It writes one word, and then waits for a pipe that no process opens.
HANGING_MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        word = pb_utils.Tensor("text_output", np.array([b"once "], np.object_))
        for request in requests:
            request.get_response_sender().send(pb_utils.InferenceResponse([word]))
        open(os.path.join(os.path.dirname(__file__), "never")).read()
"""


def test_streams_under_way_end_whole_and_the_process_ends_well(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    tiny(tmp_path / "models")
    port = free_port()
    with process(tmp_path / "models", port, child_environment) as server:
        until(port, "/readyz", server)
        with client(port) as connection:
            connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            first = answer.readline()
            server.send_signal(signal.SIGTERM)
            lines = [first, *answer.read().splitlines(keepends=True)]
        events = [line.removeprefix(b"data: ").strip() for line in lines if line.strip()]
        assert events[-1] == b"[DONE]"
        last = json.loads(events[-2])["choices"][0]
        assert last["finish_reason"] == "length"
        assert server.wait(PATIENCE_S) == 0


def test_a_stream_beyond_the_exit_timeout_ends_without_done(tmp_path: Path, child_environment: dict[str, str]) -> None:
    version = tmp_path / "models" / "hanging" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(HANGING)
    (version / "model.py").write_text(HANGING_MODEL)
    os.mkfifo(version / "never")
    port = free_port()
    flags = ("--openai", "--exit-timeout-secs=1")
    with process(tmp_path / "models", port, child_environment, *flags) as server:
        until(port, "/readyz", server)
        with client(port) as connection:
            body = json.dumps({"model": "hanging", "prompt": "x", "stream": True})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            first = answer.readline()
            server.send_signal(signal.SIGTERM)
            rest = answer.read()
        assert b"once" in first
        assert b"[DONE]" not in rest
        assert json.loads(rest.split(b"data: ")[-1])["error"]["type"] == "server_error"
        assert server.wait(PATIENCE_S) == 1
