"""The recorded verdicts of ``pb_utils`` are those of a real Triton."""

from __future__ import annotations

import json
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.programs.pb_utils_probes import TRITON, write_model
from support.servers.real_triton import needs_triton, triton_server

pytestmark = needs_triton
ATTEMPTS = 3


def test_triton_gives_the_recorded_verdicts(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    found: dict[str, str] = {}
    with triton_server(tmp_path / "models", tmp_path / "triton.log") as ports:
        for expression in TRITON:
            tensor = {"name": "EXPRESSION", "shape": [1], "datatype": "BYTES", "data": [expression]}
            request = urllib.request.Request(
                f"http://127.0.0.1:{ports[0]}/v2/models/probe/infer", json.dumps({"inputs": [tensor]}).encode()
            )
            found[expression] = _answer_to(request)["outputs"][0]["data"][0]
    assert found == TRITON


def _answer_to(request: urllib.request.Request) -> Any:
    """Return the answer; on a busy machine Triton at times closes a new connection without one."""
    for _ in range(ATTEMPTS - 1):
        with suppress(ConnectionError), urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
