"""The recorded verdicts of ``pb_utils`` are those of a real Triton."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from support.programs.pb_utils_probes import TRITON, write_model
from support.servers.real_triton import needs_triton, triton_server

pytestmark = needs_triton


def test_triton_gives_the_recorded_verdicts(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    found: dict[str, str] = {}
    with triton_server(tmp_path / "models", tmp_path / "triton.log") as ports:
        for expression in TRITON:
            tensor = {"name": "EXPRESSION", "shape": [1], "datatype": "BYTES", "data": [expression]}
            request = urllib.request.Request(
                f"http://127.0.0.1:{ports[0]}/v2/models/probe/infer", json.dumps({"inputs": [tensor]}).encode()
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                found[expression] = json.load(answer)["outputs"][0]["data"][0]
    assert found == TRITON
