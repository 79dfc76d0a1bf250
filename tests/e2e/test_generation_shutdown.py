"""A server that gets SIGTERM amid the streams of a language model."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from generation_models import tiny
from live_server import PATIENCE_S, client, free_port, process, until

BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 450, "temperature": 0, "ignore_eos": True, "stream": True}


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
