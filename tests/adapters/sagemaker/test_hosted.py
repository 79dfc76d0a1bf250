"""The multi-model API: each code of the contract, and that a URL never leads out of the models' root."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.engine import Engine
from remora.errors import InvalidArgumentError
from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host
from remora_adapters import sagemaker
from remora_adapters.sagemaker.hosted import HostedModels
from remora_adapters.sagemaker.settings import Rules
from support.servers.hosting import PATIENCE_S, Got, ask, running, write_scale
from support.servers.sagemaker_door import V2, Door, opened

QUIET = ServerOptions(allow_grpc=False, allow_metrics=False)
JSON = {"Content-Type": "application/json"}
ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "a" data_type: TYPE_FP32 dims: 4 }
output { name: "b" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling { step { model_name: "scale" model_version: -1
  input_map { key: "x" value: "a" } output_map { key: "y" value: "b" } } }
"""
PYTHON = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [-1, 4] }
output { name: "y" data_type: TYPE_FP32 dims: [-1, 4] }
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""
FAILS = """
class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        {execute}
"""


class Endpoint(Door):
    """The port of a multi-model endpoint, and the folder where the platform unpacks models."""

    root: Path

    def url(self, name: str) -> str:
        return f"{self.root}/{name}/model"

    def load(self, name: str, url: str = "", target: str = "") -> Got:
        headers = JSON | ({"X-Amzn-SageMaker-Target-Model": target} if target else {})
        body = json.dumps({"model_name": name, "url": url or self.url(name)}).encode()
        return self.ask("POST", "/models", body, headers)

    def invoke(self, name: str, body: bytes = V2, target: str = "") -> Got:
        headers = JSON | ({"X-Amzn-SageMaker-Target-Model": target} if target else {})
        return self.ask("POST", f"/models/{name}/invoke", body, headers)

    def broken(self, name: str, where: str, error: str) -> None:
        folder = self.root / name / "model" / "m"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(PYTHON)
        bodies = {"initialize": "pass", "execute": "pass"} | {where: f"raise {error}"}
        (folder / "1" / "model.py").write_text(FAILS.format(**bodies))


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    write_scale(tmp_path / "models" / "h1" / "model" / "scale")
    write_scale(tmp_path / "models" / "h2" / "model" / "scale")
    with opened(sagemaker.host({"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"})) as door:
        found = Endpoint(door.port)
        found.root = tmp_path / "models"
        yield found


def test_ping_says_yes_with_no_model_loaded(endpoint: Endpoint) -> None:
    assert endpoint.ask("GET", "/ping").status == 200
    assert json.loads(endpoint.ask("GET", "/models").body) == {"models": []}


def test_a_model_lives_from_post_to_delete_and_may_come_again(endpoint: Endpoint) -> None:
    for _ in range(2):
        assert endpoint.load("h1", target="one.tar.gz").status == 200
        entry = {"modelName": "h1", "modelUrl": endpoint.url("h1")}
        assert json.loads(endpoint.ask("GET", "/models").body) == {"models": [entry]}
        assert json.loads(endpoint.ask("GET", "/models/h1").body) == entry
        reply = endpoint.invoke("h1")
        assert reply.status == 200
        said = json.loads(reply.body)
        assert (said["model_name"], said["outputs"][0]["data"]) == ("one.tar.gz", [2.0, 4.0, 6.0, 8.0])
        assert endpoint.ask("DELETE", "/models/h1").status == 200
        for method, path in (("GET", "/models/h1"), ("DELETE", "/models/h1"), ("POST", "/models/h1/invoke")):
            assert (endpoint.ask(method, path, V2).status, endpoint.ask(method, path).body) == (404, b"")


def test_a_model_is_known_by_its_opaque_name_whatever_the_target_is(endpoint: Endpoint) -> None:
    assert endpoint.load("h1", target="same.tar.gz").status == 200
    assert endpoint.load("h2", target="same.tar.gz").status == 200
    assert endpoint.invoke("h1", target="other.tar.gz").status == 200
    assert endpoint.ask("DELETE", "/models/h1").status == 200
    assert endpoint.invoke("h2", target="same.tar.gz").status == 200
    assert endpoint.invoke("same.tar.gz").status == 404


def test_the_metrics_page_tells_models_of_equal_names_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_scale(tmp_path / "models" / name / "model" / "scale")
    host = sagemaker.host({"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"})
    with running(replace(host, server=replace(host.server, allow_metrics=True))) as ports:

        def page() -> list[str]:
            lines = ask(ports.metrics, "GET", "/metrics").body.decode().splitlines()
            return [line for line in lines if line.startswith("nv_inference_request_success")]

        assert page() == []
        for name, times in (("one", 1), ("two", 2)):
            place = {"model_name": name, "url": str(tmp_path / "models" / name / "model")}
            target = {"X-Amzn-SageMaker-Target-Model": f"{name}.tar.gz"}
            assert ask(ports.http, "POST", "/models", place, target).status == 200
            for _ in range(times):
                assert ask(ports.http, "POST", f"/models/{name}/invoke", V2, JSON).status == 200
        labels = 'hosted="{0}",model="scale",target="{0}.tar.gz",version="1"'
        assert page() == [
            f"nv_inference_request_success{{{labels.format('one')}}} 1",
            f"nv_inference_request_success{{{labels.format('two')}}} 2",
        ]
        assert ask(ports.http, "DELETE", "/models/one").status == 200
        assert [line for line in page() if "one" in line] == []


def test_traces_of_all_models_go_to_the_one_file_whichever_is_loaded_or_unloaded_meanwhile(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_scale(tmp_path / "models" / name / "model" / f"scale_{name}")
    flags = f"--trace-config=level=TIMESTAMPS --trace-config=rate=1 --trace-config=triton,file={tmp_path}/traces.json"
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"}
    with opened(sagemaker.host({**environ, "SAGEMAKER_TRITON_ADDITIONAL_ARGS": flags})) as door:
        endpoint = Endpoint(door.port)
        endpoint.root = tmp_path / "models"
        for name in ("one", "two", "one"):
            assert endpoint.load(name).status == 200
            assert endpoint.invoke(name).status == 200
            assert endpoint.ask("DELETE", f"/models/{name}").status == 200
    records = json.loads((tmp_path / "traces.json").read_text())
    assert [record["model_name"] for record in records if "model_name" in record] == [
        "scale_one",
        "scale_two",
        "scale_one",
    ]


def test_a_body_that_cannot_be_read_is_the_clients_fault_on_tritons_own_port_too(tmp_path: Path) -> None:
    write_scale(tmp_path / "models" / "h1" / "model" / "scale")
    front = sagemaker._front(Rules(as_triton=True, models_root=tmp_path / "models"), tmp_path / "scratch")
    none = tmp_path / "none"
    none.mkdir()
    with opened(Host(EngineOptions(paths=(none,), model_control_mode="explicit"), QUIET, front)) as door:
        place = {"model_name": "h1", "url": f"{tmp_path}/models/h1/model"}
        assert door.ask("POST", "/models", json.dumps(place).encode(), JSON).status == 200
        assert door.ask("POST", "/models/h1/invoke", b"{bad", JSON).status == 400
        assert door.ask("POST", "/models/h1/invoke", V2, JSON).status == 200


def test_ping_on_tritons_own_port_says_no_after_a_failed_load_until_the_target_loads(tmp_path: Path) -> None:
    endpoint = Endpoint(0)
    endpoint.root = tmp_path / "models"
    endpoint.broken("h1", "initialize", "ValueError('no weights')")
    write_scale(tmp_path / "models" / "h2" / "model" / "scale")
    none = tmp_path / "none"
    none.mkdir()
    for live in (False, True):
        rules = Rules(as_triton=True, ping_live=live, models_root=endpoint.root)
        front = sagemaker._front(rules, tmp_path / "scratch")
        with opened(Host(EngineOptions(paths=(none,), model_control_mode="explicit"), QUIET, front)) as door:
            endpoint.port = door.port
            assert endpoint.load("h3").status == 400  # there is no such folder, and no model that failed
            assert endpoint.ask("GET", "/ping").status == 200
            assert endpoint.load("h1", target="a").status == 400
            reply = endpoint.ask("GET", "/ping")
            assert (reply.status, reply.body) == (200 if live else 400, b"")
            assert endpoint.load("h2", target="b").status == 200
            assert endpoint.ask("DELETE", "/models/h2").status == 200
            assert endpoint.ask("GET", "/ping").status == (200 if live else 400)
            assert endpoint.load("h2", target="a").status == 200
            assert endpoint.ask("GET", "/ping").status == 200


def test_a_failed_load_leaves_the_platforms_ping_as_it_was(endpoint: Endpoint) -> None:
    endpoint.broken("h4", "initialize", "ValueError('no weights')")
    assert endpoint.load("h4").status == 400
    assert endpoint.ask("GET", "/ping").status == 200


def test_a_url_without_a_folder_is_refused_with_tritons_text(endpoint: Endpoint) -> None:
    reply = endpoint.load("h9")
    assert reply.status == 400
    assert json.loads(reply.body) == {"error": f"failed to register '{endpoint.url('h9')}', repository not found"}


def test_a_url_elsewhere_is_refused_with_tritons_text(endpoint: Endpoint) -> None:
    for url in ("/proc/self", f"{endpoint.root}/h1", "s3://bucket/model", f"{endpoint.url('h1')}x"):
        reply = endpoint.load("h1", url)
        expected = f"Invalid \"url\" '{url}': expected a path of the form {endpoint.root}/<hash>/model[/<subdir>]"
        assert (reply.status, json.loads(reply.body)) == (400, {"error": expected})


def test_the_same_name_or_the_same_url_again_is_a_conflict(endpoint: Endpoint) -> None:
    assert endpoint.load("h1").status == 200
    for reply in (
        endpoint.load("h1"),
        endpoint.load("h1", endpoint.url("h2")),
        endpoint.load("h9", endpoint.url("h1")),
    ):
        assert reply.status == 409
        assert b"has already been registered" in reply.body


def test_a_known_name_with_a_missing_folder_is_refused_for_the_folder(endpoint: Endpoint) -> None:
    assert endpoint.load("h1").status == 200
    reply = endpoint.load("h1", endpoint.url("h9"))
    assert reply.status == 400
    assert json.loads(reply.body) == {"error": f"failed to register '{endpoint.url('h9')}', repository not found"}


def test_equal_names_inside_two_models_do_not_meet(endpoint: Endpoint) -> None:
    assert endpoint.load("h1").status == endpoint.load("h2").status == 200
    assert endpoint.ask("DELETE", "/models/h1").status == 200
    assert endpoint.invoke("h2").status == 200


def test_of_several_models_the_ensemble_answers(endpoint: Endpoint) -> None:
    folder = endpoint.root / "h1" / "model" / "whole"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(ENSEMBLE)
    assert endpoint.load("h1").status == 200
    reply = endpoint.invoke("h1", V2.replace(b'"x"', b'"a"'))
    assert json.loads(reply.body)["outputs"][0]["name"] == "b"
    shutil.rmtree(folder)
    shutil.copytree(endpoint.root / "h2" / "model" / "scale", endpoint.root / "h2" / "model" / "other")
    reply = endpoint.load("h2")
    assert reply.status == 400
    assert b"2 models and 0 ensembles" in reply.body


def test_an_inference_script_is_hosted_too(endpoint: Endpoint) -> None:
    code = endpoint.root / "h3" / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text("def predict_fn(data, model):\n    return data * 3\n")
    assert endpoint.load("h3").status == 200
    assert endpoint.invoke("h3", b"[1, 2]").body == b"[3,6]"


def test_the_variable_that_names_the_script_holds_for_hosted_models_too(tmp_path: Path) -> None:
    code = tmp_path / "models" / "h1" / "model" / "code"
    code.mkdir(parents=True)
    (code / "mine.py").write_text("def predict_fn(data, model):\n    return data * 3\n")
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_PROGRAM": "mine.py", "SAGEMAKER_BASE_DIR": str(tmp_path)}
    with opened(sagemaker.host(environ)) as door:
        place = {"model_name": "h1", "url": f"{tmp_path}/models/h1/model"}
        assert door.ask("POST", "/models", json.dumps(place).encode(), JSON).status == 200
        assert door.ask("POST", "/models/h1/invoke", b"[1, 2]", JSON).body == b"[3,6]"


def test_a_folder_beside_the_model_that_is_none_is_not_counted(endpoint: Endpoint) -> None:
    (endpoint.root / "h1" / "model" / "tokenizer").mkdir()
    (endpoint.root / "h1" / "model" / "tokenizer" / "vocabulary.txt").write_text("a b c")
    assert endpoint.load("h1").status == 200
    assert endpoint.invoke("h1").status == 200


@pytest.mark.parametrize("name", ["..", ".", "\u00e9" * 300, "a\nb"])
def test_a_name_is_never_a_path(endpoint: Endpoint, name: str) -> None:
    code = endpoint.root / "h5" / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text("def predict_fn(data, model):\n    return data\n")
    before = sorted(endpoint.root.rglob("*"))
    assert endpoint.load(name, endpoint.url("h5")).status == 200
    assert sorted(path for path in endpoint.root.rglob("*") if "__pycache__" not in path.parts) == before
    assert [row["modelName"] for row in json.loads(endpoint.ask("GET", "/models").body)["models"]] == [name]


@pytest.mark.parametrize(
    ("where", "error", "load", "invoke"),
    [
        ("initialize", "ValueError('no weights')", 400, 404),
        ("initialize", "MemoryError('8 GiB')", 507, 404),
        ("execute", "RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')", 200, 507),
        ("execute", "ValueError('no')", 200, 500),
    ],
)
def test_only_out_of_memory_is_507(endpoint: Endpoint, where: str, error: str, load: int, invoke: int) -> None:
    endpoint.broken("h4", where, error)
    assert endpoint.load("h4").status == load
    assert endpoint.invoke("h4").status == invoke
    if load != 200:  # the platform comes back with the same name when it has made room
        assert endpoint.load("h4").status == load


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model_name": "a"}',
        b'{"model_name": 1, "url": "/x"}',
        b'{"model_name":"a/b","url":"x"}',
    ],
)
def test_a_load_request_that_makes_no_sense_is_refused(endpoint: Endpoint, body: bytes) -> None:
    reply = endpoint.ask("POST", "/models", body, JSON)
    assert reply.status == 400
    assert json.loads(reply.body)["error"]
    assert endpoint.ask("GET", "/ping").status == 200


def test_the_list_has_pages(endpoint: Endpoint) -> None:
    for name in [f"m{number:03}" for number in range(101)]:
        write = endpoint.root / name / "model"
        write.mkdir(parents=True)
        os.symlink(endpoint.root / "h1" / "model" / "scale", write / "scale")
        assert endpoint.load(name).status == 200
    first = json.loads(endpoint.ask("GET", "/models").body)
    assert (len(first["models"]), first["nextPageToken"]) == (100, "100")
    second = json.loads(endpoint.ask("GET", "/models?next_page_token=100").body)
    assert (len(second["models"]), "nextPageToken" in second) == (1, False)


def test_a_model_that_loads_keeps_no_ping_waiting(endpoint: Endpoint) -> None:
    folder = endpoint.root / "slow" / "model" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(PYTHON)
    gate = folder / "gate"
    os.mkfifo(gate)
    waits = f"__import__('pathlib').Path({str(gate)!r}).read_text()"
    (folder / "1" / "model.py").write_text(FAILS.format(initialize=waits, execute="pass"))
    statuses: list[int] = []
    load = threading.Thread(target=lambda: statuses.append(endpoint.load("slow").status))
    load.start()
    with gate.open("w"):  # opens when the model reads: it is being loaded now
        assert endpoint.ask("GET", "/ping").status == 200
        assert json.loads(endpoint.ask("GET", "/models").body) == {"models": []}
        assert endpoint.invoke("slow").status == 404
        assert endpoint.load("slow").status == 409
        assert endpoint.ask("DELETE", "/models/slow").status == 404
    load.join(PATIENCE_S)
    assert statuses == [200]


# -- the root -------------------------------------------------------------------------------------------------------


def table(root: Path) -> HostedModels:
    return HostedModels(root, Engine(), root / "scratch", lambda engine, name: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/",
        "{root}",
        "{root}/a",
        "{root}/a/other",
        "{root}/../etc/model",
        "{root}/a/../../etc",
        "{root}/a/model/..",
        "{root}/a/model/../../b/model",
        "{root}/%2e%2e/model",
        "{root}/./model",
        "{root}/a/model/\u2215etc",
        "{root}/a/model\n",
        "{root}x/a/model",
        "/etc/a/model",
        "/dev/a/model",
        "/proc/self/model",
        "file://{root}/a/model",
        "s3://bucket/a/model",
        "{root}/" + "a" * 10_000 + "/model/../../..",
    ],
)
def test_a_url_that_is_not_a_models_folder_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"form .*<hash>/model"):
        table(tmp_path).add("a", url.format(root=tmp_path), "t")


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "models"
    (root / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "a" / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidArgumentError):
        table(root).add("a", f"{root}/a/model", "t")


def test_a_link_to_itself_is_not_a_folder(endpoint: Endpoint) -> None:
    (endpoint.root / "round").mkdir()
    (endpoint.root / "round" / "model").symlink_to(endpoint.root / "round" / "model")
    reply = endpoint.load("round")
    assert reply.status == 400
    assert json.loads(reply.body)["error"]


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_whatever_a_url_says_only_folders_below_the_root_are_taken(text: str) -> None:
    root = Path("/opt/ml/models")
    try:
        work = table(root).add("a", f"{root}/{text}", "t")
    except InvalidArgumentError:
        return
    assert work is not None
    assert Path(f"{root}/{text}").resolve().is_relative_to(root)


def test_a_refused_url_leaves_no_name_behind(tmp_path: Path) -> None:
    models = table(tmp_path)
    with pytest.raises(InvalidArgumentError):
        models.add("a", "/etc", "t")
    assert models.add("a", f"{tmp_path}/a/model", "t") is not None


def test_a_load_that_fails_elsewhere_does_not_disturb_readers_of_the_table(tmp_path: Path) -> None:
    hosted = table(tmp_path)

    class Url(str):
        """Has another thread forget a model while it is compared."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            forgetting = threading.Thread(target=hosted.forget, args=("a",))
            forgetting.start()
            forgetting.join()
            return str.__eq__(self, other)

    for name in ("a", "b", "c"):
        assert hosted.add(name, f"{tmp_path}/{name}/model", name)
    assert hosted.add("d", Url(f"{tmp_path}/d/model"), "d")
