"""KServe: its own client finds a server, its own server says the same, and its agent, batcher and events are served."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import end, free_ports
from remora.options import EngineOptions
from remora_adapters import kserve as adapter
from support.process.eventually import eventually
from support.servers.hosting import Got, ask, hosted, running, v2_request, write_scale, write_words

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

THEIRS = Path(__file__).with_name("kserve_model_server.py")
ROWS = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.5]]
DOUBLED = [[2.0, 4.0, 6.0, 8.0], [10.0, 12.0, 14.0, 17.0]]
JSON = {"Content-Type": "application/json"}
EVENT = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "here", "ce-type": "request", **JSON}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_scale(folder / "scale")
    write_words(folder / "words")
    return folder


@pytest.fixture(scope="module")
def port(repository: Path) -> Iterator[int]:
    with hosted("kserve", {"REMORA_MODEL_REPOSITORY": str(repository)}) as found:
        yield found


# -- KServe's own server and client -----------------------------------------------------------------------------------

STRUCTURED = {
    "specversion": "1.0",
    "id": "1",
    "source": "here",
    "type": "request",
    "time": "2026-01-01T00:00:00Z",
    "data": {"instances": ROWS},
}
CASES: list[tuple[str, str, Any, dict[str, str]]] = [
    ("GET", "/", b"", {}),
    ("GET", "/v1/models/scale", b"", {}),
    ("GET", "/v1/models/none", b"", {}),
    ("POST", "/v1/models/scale:predict", {"instances": ROWS}, {}),
    ("POST", "/v1/models/scale:predict", {"inputs": ROWS}, {}),
    ("POST", "/v1/models/scale:predict", b"{", JSON),
    ("GET", "/v1/models/scale:predict", b"", {}),
    ("POST", "/v1/models/scale:predict", {"instances": ROWS}, EVENT),
    ("POST", "/v1/models/scale:predict", STRUCTURED, {"Content-Type": "application/cloudevents+json"}),
    ("POST", "/v1/models/scale:predict", {"instances": ROWS}, {"ce-specversion": "1.0", "ce-id": "1", **JSON}),
    ("POST", "/v1/models/none:predict", {"instances": ROWS}, {}),
    ("GET", "/v2/health/live", b"", {}),
    ("GET", "/v2/health/ready", b"", {}),
    ("GET", "/v2/models/scale/ready", b"", {}),
    ("GET", "/v2/models/none/ready", b"", {}),
    ("POST", "/v2/models/scale/infer", v2_request(ROWS, id="7"), {}),
    ("POST", "/v2/models/none/infer", v2_request(ROWS), {}),
    ("GET", "/v1/models/sc%61le", b"", {}),
    ("POST", "/v1/models/sc%61le:predict", {"instances": ROWS}, {}),
    ("POST", "/v1/models/scale%3Apredict", {"instances": ROWS}, {}),
    ("POST", "/v1/models/sca:le:predict", {"instances": ROWS}, {}),
    ("GET", "/v2/models/sc%61le/ready", b"", {}),
    ("GET", "/v2%2Fhealth/live", b"", {}),
    ("POST", "/v2/models/sc%61le/infer", v2_request(ROWS, id="7"), {}),
    ("GET", "/nowhere", b"", {}),
    ("POST", "/v1/models", b"", {}),
]
WORDED = {"/v1/models/none:predict", "/v1/models/sca:le:predict", "/v2/models/none/infer"}
"""Where ours says the same in Triton's words."""


def comparable(path: str, got: Got) -> tuple[object, ...]:
    """What clients go by: codes, kinds of content, values. Reasons for a malformed body are each server's own."""
    body = json.loads(got.body)
    if path.endswith("/infer") and got.status == 200:
        body = {key: body[key] for key in ("id", "model_name", "outputs")}
        body["outputs"] = [{**row, "data": np.ravel(row["data"]).tolist()} for row in body["outputs"]]
        for row in body["outputs"]:
            row.pop("parameters", None)
    if got.status == 400 or (got.status == 404 and path in WORDED):
        body = sorted(body)
    for name in ("id", "time") if "specversion" in body else ():
        assert body.pop(name)
    events = {name: value for name, value in got.headers.items() if name.startswith("ce-")}
    for name in ("ce-id", "ce-time") if events else ():
        assert events.pop(name)
    return got.status, got.headers["content-type"], events, body


def test_kserves_own_server_answers_the_same(port: int, tmp_path: Path) -> None:
    (theirs,) = free_ports(1)
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen([sys.executable, THEIRS, str(theirs)], stdout=log, stderr=log)
        try:
            eventually(
                lambda: ask(theirs, "GET", "/v2/health/ready").status == 200, process=process, log=tmp_path / "log.txt"
            )
            print("kserve", version("kserve"))
            different = []
            for method, path, body, headers in CASES:
                wanted, got = (comparable(path, ask(each, method, path, body, headers)) for each in (theirs, port))
                if wanted != got:
                    different.append(f"{method} {path} {headers}\n  theirs {wanted}\n  ours   {got}")
            assert not different, "\n".join(different)
        finally:
            end(process)


CLIENT = """
import asyncio, sys
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

base, rows = sys.argv[1], [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.5]]
doubled = (2 * np.array(rows)).tolist()

async def talk():
    v2 = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await v2.is_server_live(base)
    assert await v2.is_server_ready(base)
    assert await v2.is_model_ready(base, "scale")
    tensor = InferInput("x", [2, 4], "FP32")
    tensor.set_data_from_numpy(np.array(rows, np.float32), binary_data=True)
    request = InferRequest("scale", [tensor], request_outputs=[RequestedOutput("y")])
    answer = await v2.infer(base, request, model_name="scale")
    assert answer.outputs[0].as_numpy().tolist() == doubled
    v1 = InferenceRESTClient(RESTConfig(protocol="v1"))
    assert await v1.is_model_ready(base, "scale")
    assert (await v1.infer(base, {"instances": rows}, model_name="scale"))["predictions"] == doubled

asyncio.run(talk())
"""
"""Runs in a separate process: kserve and tritonclient both register messages of the same names."""


def test_kserves_client_finds_a_server(port: int) -> None:
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("kserve is not installed: pip install '.[dev]'")
    command = [sys.executable, "-c", CLIENT, f"http://127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


# -- what KServe's parts do -------------------------------------------------------------------------------------------


def test_predictions_are_one_for_one_beyond_the_models_batch_size(port: int) -> None:
    rows = [[float(index)] * 4 for index in range(37)]  # the model takes 8
    answer = ask(port, "POST", "/v1/models/scale:predict", {"instances": rows})
    assert answer.json["predictions"] == [[2.0 * index] * 4 for index in range(37)]


def test_one_instance_that_does_not_fit_fails_the_whole_request(port: int) -> None:
    rows = [[1.0] * 4] * 9 + [[1.0] * 3]
    answer = ask(port, "POST", "/v1/models/scale:predict", {"instances": rows})
    assert (answer.status, list(answer.json)) == (400, ["error"])
    wide = ask(port, "POST", "/v1/models/scale:predict", {"instances": [[1.0] * 5] * 20})
    assert (wide.status, list(wide.json)) == (400, ["error"])


def test_text_and_models_of_fixed_shape_are_predicted(port: int) -> None:
    answer = ask(port, "POST", "/v1/models/words:predict", {"instances": [["a"], ["é"], [{"b64": "Yg=="}]]})
    assert answer.json == {"predictions": [["a"], ["é"], ["b"]]}


def test_there_is_no_explainer(port: int) -> None:
    assert ask(port, "POST", "/v1/models/scale:explain", {"instances": ROWS}).status == 501


def test_models_are_listed_in_both_protocols(port: int) -> None:
    for path in ("/v1/models", "/v2/models"):
        assert ask(port, "GET", path).json == {"models": ["scale", "words"]}


def test_restrictions_of_v2_hold_for_v1_too(repository: Path) -> None:
    host = adapter.host({"REMORA_MODEL_REPOSITORY": str(repository)})
    locked = replace(host.server, http_restricted_api=("metadata,health,inference:api-key=secret",))
    with running(replace(host, server=locked)) as ports:
        for path in ("/v1/models", "/v1/models/scale", "/v2/models", "/v2/models/scale/ready"):
            assert ask(ports.http, "GET", path).status == 403, path
            assert ask(ports.http, "GET", path, headers={"api-key": "secret"}).status == 200, path
        assert ask(ports.http, "POST", "/v1/models/scale:predict", {"instances": ROWS}).status == 403
        assert ask(ports.http, "GET", "/").status == 200  # a probe has no secret


def test_a_missing_key_is_refused_in_the_form_of_each_protocol(repository: Path) -> None:
    host = adapter.host({"REMORA_MODEL_REPOSITORY": str(repository)})
    keys = replace(host.server, api_key=(f"ann:infer=sha256:{sha256(b'right').hexdigest()}",))
    with running(replace(host, server=keys)) as ports:
        for method, path in (
            *(("GET", "/v1/models"), ("GET", "/v1/models/scale"), ("POST", "/v1/models/scale:predict")),
            *(("GET", "/v2/models"), ("POST", "/v2/models/scale/infer"), ("POST", "/v1/models/gone:explain")),
        ):
            answer = ask(ports.http, method, path, {} if method == "POST" else None)
            assert (answer.status, type(answer.json["error"])) == (401, str), path
        answer = ask(ports.http, "POST", "/openai/v1/chat/completions", {})
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")


def test_metrics_are_on_the_one_port(port: int) -> None:
    ask(port, "POST", "/v1/models/scale:predict", {"instances": ROWS})
    assert b'nv_inference_request_success{model="scale"' in ask(port, "GET", "/metrics").body


def test_the_agent_loads_and_unloads_with_empty_bodies_even_what_it_has_deleted(tmp_path: Path) -> None:
    options = EngineOptions(paths=(str(tmp_path),), model_control_mode="explicit")
    host = adapter.host({})
    with running(type(host)(options, host.server, host.front)) as ports:
        write_scale(tmp_path / "scale")
        loaded = ask(ports.http, "POST", "/v2/repository/models/scale/load")
        assert (loaded.status, loaded.json) == (200, {"name": "scale", "load": True})
        assert ask(ports.http, "GET", "/v1/models/scale").json == {"name": "scale", "ready": True}
        shutil.rmtree(tmp_path / "scale")
        unloaded = ask(ports.http, "POST", "/v2/repository/models/scale/unload")
        assert (unloaded.status, unloaded.json) == (200, {"name": "scale", "unload": True})
        assert ask(ports.http, "GET", "/v1/models/scale").status in (404, 503)
        missing = ask(ports.http, "POST", "/v2/repository/models/none/load")
        assert missing.status >= 400
        assert missing.headers["content-type"] == "application/json"


@pytest.mark.parametrize("layout", ["repository", "model", "file"])
def test_both_layouts_of_the_mounted_folder_are_served(tmp_path: Path, layout: str) -> None:
    write_scale(tmp_path / "scale" if layout == "repository" else tmp_path / "made")
    if layout == "model":
        (tmp_path / "made" / "1").rename(tmp_path / "1")
    if layout == "file":
        (tmp_path / "made" / "1" / "model.onnx").rename(tmp_path / "model.onnx")
    if layout != "repository":
        shutil.rmtree(tmp_path / "made")
    host = adapter.host({"REMORA_MODEL_REPOSITORY": str(tmp_path)})
    named = EngineOptions(paths=host.engine.paths, model_name="isvc")
    name = "scale" if layout == "repository" else "isvc"
    with running(type(host)(named, host.server, host.front)) as ports:
        answer = ask(ports.http, "POST", f"/v1/models/{name}:predict", {"instances": ROWS})
        assert answer.json["predictions"] == DOUBLED


def test_v2_can_be_as_triton_has_it(repository: Path) -> None:
    with hosted("kserve", {"REMORA_MODEL_REPOSITORY": str(repository), "REMORA_V2_ANSWERS": "triton"}) as port:
        assert ask(port, "GET", "/v2/health/live").body == b""
        assert ask(port, "GET", "/v2/models/none/ready").headers["content-type"] == "text/plain"


def test_a_server_waits_for_the_link_of_a_modelcar(tmp_path: Path) -> None:
    (tmp_path / "sidecar").mkdir()
    link, waits = tmp_path / "models", []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            link.symlink_to(tmp_path / "sidecar")

    adapter.wait_for_modelcar({"MODEL_INIT_MODE": "async", "REMORA_MODEL_REPOSITORY": str(link)}, sleep)
    assert len(waits) == 3


def test_a_server_waits_neither_without_a_modelcar_nor_for_ever(tmp_path: Path) -> None:
    waits: list[float] = []
    missing = {"REMORA_MODEL_REPOSITORY": str(tmp_path / "none")}
    adapter.wait_for_modelcar(missing, waits.append)
    assert waits == []
    adapter.wait_for_modelcar({**missing, "MODEL_INIT_MODE": "async"}, waits.append)
    assert sum(waits) == pytest.approx(300)


def test_the_ports_are_those_that_kserve_has_fixed() -> None:
    server = adapter.host({}).server
    assert (server.http_address, server.http_port, server.grpc_port) == ("0.0.0.0", 8080, 8081)
    assert server.grpc_on_http_port
    assert adapter.host({}).engine.paths == ("/mnt/models",)
    with pytest.raises(ValueError, match="REMORA_V2_ANSWERS"):
        adapter.host({"REMORA_V2_ANSWERS": "both"})


def test_it_starts_with_the_arguments_of_a_serving_runtime(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_scale(tmp_path / "mounted")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "remora_adapters.kserve", "--model_name=isvc", f"--http-port={port}"]
    command += ["--allow-grpc=false", str(tmp_path / "mounted")]
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=child_environment, stdout=output, stderr=output)
    try:
        eventually(lambda: ask(port, "GET", "/v1/models/isvc").status == 200, process=process, log=log)
    finally:
        assert end(process) == 0


def test_a_name_in_a_path_of_openai_is_decoded_once(port: int) -> None:
    for segment, name in (("50%2541", "50%41"), ("50%41", "50A"), ("a%2Fb", "a/b")):
        refused = ask(port, "GET", f"/openai/v1/models/{segment}", b"", {})
        assert refused.status == 404
        assert f"the model '{name}' does not exist" in json.loads(refused.body)["error"]["message"]
