"""The sample of an InferenceGraph: read by KServe's own classes, and run by KServe's rules against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from support.servers.hosting import ask, hosted, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

SAMPLE = ROOT / "infra" / "kubernetes" / "kserve-graph" / "inferencegraph.yaml"
SERVICES = {"remora", "remora-new", "remora-second"}


@pytest.fixture
def graph() -> Any:
    return yaml.safe_load(SAMPLE.read_text())


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server with the models of all services, which the cluster would have in different pods."""
    folder: Path = tmp_path_factory.mktemp("models")
    for name in SERVICES:
        write_scale(folder / name)
    with hosted("kserve", {"REMORA_MODEL_REPOSITORY": str(folder)}) as found:
        yield found


def kserves_classes() -> Any:
    """Import KServe's package, which refuses a protobuf that is newer than it knows."""
    try:
        import kserve
    except (ImportError, TypeError) as error:
        pytest.skip(f"kserve cannot be imported: {str(error).splitlines()[0]}")
    return kserve


def unknown(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Yield what KServe's class of an object does not know."""
    kserve = kserves_classes()
    known = {json_name: attribute for attribute, json_name in kind.attribute_map.items()}
    for key, each in value.items():
        if key not in known:
            yield f"{where}{key}"
            continue
        wanted = kind.openapi_types[known[key]]
        found = getattr(kserve, wanted.removeprefix("list[").removeprefix("dict(str, ").rstrip("])"), None)
        if found is not None and hasattr(found, "attribute_map"):
            many = each if isinstance(each, list) else list(each.values()) if wanted.startswith("dict") else [each]
            for one in many:
                yield from unknown(one, found, f"{where}{key}.")


def test_kserves_own_classes_know_every_field(graph: Any) -> None:
    kserve = kserves_classes()
    assert (graph["apiVersion"], graph["kind"]) == ("serving.kserve.io/v1alpha1", "InferenceGraph")
    assert list(unknown(graph, kserve.V1alpha1InferenceGraph)) == []
    graph["spec"]["nodes"]["root"]["steps"][0]["nodename"] = "versions"
    assert list(unknown(graph, kserve.V1alpha1InferenceGraph)) == ["spec.nodes.steps.nodename"]


def test_every_step_leads_to_a_node_or_a_service_and_shares_sum_to_100(graph: Any) -> None:
    nodes = graph["spec"]["nodes"]
    assert "root" in nodes, "the router begins there"
    for node in nodes.values():
        for step in node["steps"]:
            assert step.get("nodeName") in nodes or step.get("serviceName") in SERVICES, step
        if node["routerType"] == "Splitter":
            assert sum(step["weight"] for step in node["steps"]) == 100


class Router:
    """KServe's router: posts the body of a step to its service, and chooses among the steps of a splitter."""

    def __init__(self, nodes: Any, port: int, choice: int) -> None:
        self.nodes, self.port, self.choice = nodes, port, choice
        self.asked: list[str] = []

    def node(self, name: str, body: bytes) -> bytes:
        node = self.nodes[name]
        if node["routerType"] == "Splitter":
            return self.step(node["steps"][self.choice], body)
        assert node["routerType"] == "Sequence"
        answer = body
        for step in node["steps"]:
            sent = answer if step.get("data") == "$response" else body
            if step.get("mapPredictionsToInstances"):
                sent = json.dumps({"instances": json.loads(sent)["predictions"]}).encode()
            answer = self.step(step, sent)
        return answer

    def step(self, step: Any, body: bytes) -> bytes:
        if "nodeName" in step:
            return self.node(step["nodeName"], body)
        self.asked.append(step["serviceName"])
        answer = ask(self.port, "POST", f"/v1/models/{step['serviceName']}:predict", body)
        assert answer.status == 200, answer
        return answer.body


@pytest.mark.parametrize(("choice", "service"), [(0, "remora"), (1, "remora-new")])
def test_predictions_of_either_version_reach_the_second_model(graph: Any, port: int, choice: int, service: str) -> None:
    router = Router(graph["spec"]["nodes"], port, choice)
    answer = router.node("root", json.dumps({"instances": [[1.0, 2.0, 3.0, 4.0]]}).encode())
    assert json.loads(answer)["predictions"] == [[4.0, 8.0, 12.0, 16.0]]
    assert router.asked == [service, "remora-second"]
