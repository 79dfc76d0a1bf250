"""`remora explain` and its route against a real server: models that have run, have not, and are not there."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

from conftest import RunningServer, Serving
from remora.cli import main
from remora_tools.deciders.explaining import ENOUGH_REQUESTS

DOUBLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * 2)]) for array in inputs]
"""
CONFIG = """
backend: "python" max_batch_size: 8 dynamic_batching { }
input { name: "IN" data_type: TYPE_INT32 dims: 1 } output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [3]}]})


def get(server: RunningServer, path: str) -> tuple[int, dict[str, object]]:
    client = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
    try:
        client.request("GET", path)
        response = client.getresponse()
        return response.status, json.loads(response.read())
    finally:
        client.close()


def test_a_server_explains_its_models(serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("m", "idle"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(DOUBLER)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG)
    with serving(tmp_path) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
        for _ in range(ENOUGH_REQUESTS + 1):
            client.request("POST", "/v2/models/m/infer", BODY)
            response = client.getresponse()
            assert response.status == 200, response.read()
            response.read()
        client.close()
        for path in ("/v2/models/m/explain", "/v2/models/m/versions/1/explain"):
            status, found = get(server, path)
            assert status == 200
            assert found["predicted"]
        assert get(server, "/v2/models/idle/explain")[1]["predicted"] == []
        assert get(server, "/v2/models/nobody/explain")[0] == 404
        schemas = get(server, "/v2/openapi.json")[1]["components"]["schemas"]  # type: ignore[index]
        assert schemas["Explanation"]["required"] == list(found)
        url = f"http://127.0.0.1:{server.http}"
        assert main(["explain", "m", "--url", url]) == 0
        assert "as it is" in capsys.readouterr().out
        assert main(["explain", "m", "--url", url, "--json-out"]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == "m"
        assert main(["explain", "nobody", "--url", url]) == 1
        assert "nobody" in capsys.readouterr().err
