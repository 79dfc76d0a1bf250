"""Services that a decorated function shares with all other models, each through `remora serve` as its users call it."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import EXTRA_FLAGS, free_ports
from support.process.eventually import eventually
from support.servers.live_server import child, client, process, replace, until

KINDS = """
import dataclasses
from typing import TypedDict

import numpy as np
import pydantic
import PIL.Image
import remora

@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0

class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0)

class Both(TypedDict):
    total: float
    words: list[str]

@remora.model(isolation="thread")
def length(point: Point) -> float:
    return (point.x ** 2 + point.y ** 2) ** 0.5

@remora.model(isolation="thread")
def older(person: Person) -> Person:
    return person.model_copy(update={"age": person.age + 1})

@remora.model(batch=4, isolation="thread")
def flip(picture: list[PIL.Image.Image]) -> list[PIL.Image.Image]:
    return [each.transpose(PIL.Image.Transpose.ROTATE_90) for each in picture]

@remora.model(isolation="thread")
def count(file: bytes) -> int:
    return len(file)

@remora.model(isolation="thread")
def both(numbers: list[float], words: list[str], upper: bool = False, extra: dict | None = None) -> Both:
    return {"total": sum(numbers) + len(extra or {}), "words": [each.upper() if upper else each for each in words]}
"""


def _ask(port: int, path: str, body: Any) -> tuple[int, Any]:
    with client(port) as connection:
        connection.request("POST" if body is not None else "GET", path, body and json.dumps(body))
        reply = connection.getresponse()
        content = reply.read()
        is_json = (reply.getheader("Content-Type") or "").startswith("application/json")
        return reply.status, json.loads(content) if is_json else content.decode()


@contextmanager
def _served(folder: Path, *words: str, environment: dict[str, str] | None = None) -> Iterator[int]:
    """Run `remora serve` with these words in a folder, and yield its port once it is ready."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "remora", "serve", *words, f"--http-port={port}", "--allow-grpc=false"]
    command += ["--allow-metrics=true", "--metrics-port=0", *EXTRA_FLAGS]
    with child(command, environment, folder) as server:
        until(port, "/v2/health/ready", server)
        yield port


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    pytest.importorskip("PIL", reason="Pillow is not installed: pip install '.[dev]'")
    pytest.importorskip("pydantic", reason="pydantic is not installed: pip install '.[dev]'")
    app = tmp_path_factory.mktemp("kinds") / "app.py"
    app.write_text(KINDS)
    with _served(app.parent, "app.py") as port:
        yield port


@pytest.mark.parametrize(
    ("model", "body", "answer"),
    [
        ("length", {"point": {"x": 3, "y": 4}}, {"output": 5.0}),
        ("older", {"person": {"name": "Ada", "age": 36}}, {"output": {"name": "Ada", "age": 37}}),
        ("count", {"file": {"b64": base64.b64encode(bytes(range(256))).decode()}}, {"output": 256}),
        ("both", {"numbers": [1, 2.5], "words": ["a", "ä"]}, {"total": 3.5, "words": ["a", "ä"]}),
        (
            "both",
            {"numbers": [], "words": ["a"], "upper": True, "extra": {"one": 1}},
            {"total": 1.0, "words": ["A"]},
        ),
    ],
    ids=str,
)
def test_values_of_every_kind_go_through_plain_json(kinds: int, model: str, body: Any, answer: Any) -> None:
    assert _ask(kinds, f"/models/{model}", body) == (200, answer)


def test_a_value_that_a_pydantic_model_refuses_is_the_clients_error(kinds: int) -> None:
    status, answer = _ask(kinds, "/models/older", {"person": {"name": "Ada", "age": -1}})
    assert status == 400
    assert "person" in answer["error"]
    assert "greater than or equal to 0" in answer["error"]


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        ("length", {"point": {"x": "3"}}, 'point.x: expected a number, got "3"'),
        ("length", {"point": [{"x": 3}]}, "input 'point': expected a JSON object, got a list of 1 values"),
        ("both", {"numbers": [[1], [2]], "words": ["a"]}, "input 'numbers': expected numbers of shape [any]"),
        (
            "flip",
            {"picture": {"b64": base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").decode()}},
            "input 'picture': the image cannot be read: it is not an image of the format BMP, GIF, JPEG, PNG,",
        ),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_the_clients_error(kinds: int, model: str, body: Any, text: str) -> None:
    status, answer = _ask(kinds, f"/models/{model}", body)
    assert status == 400
    assert text in answer["error"]


def test_pictures_are_sent_and_answered_as_files(kinds: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[dev]'")
    content = io.BytesIO()
    image.new("RGB", (5, 3), "red").save(content, "PNG")
    status, answer = _ask(kinds, "/models/flip", {"picture": {"b64": base64.b64encode(content.getvalue()).decode()}})
    assert status == 200
    assert image.open(io.BytesIO(base64.b64decode(answer["output"]["b64"]))).size == (3, 5)


STEPS = """
import remora

@remora.model(batch=8, max_delay="1ms")
def lower(text: list[str]) -> list[str]:
    return [each.lower() for each in text]
"""
OTHERS = """
import remora

@remora.model(batch=8, isolation="thread")
def size(text: list[str]) -> list[int]:
    return [len(each) for each in text]

@remora.model(isolation="thread")
def unused(x: int) -> int:
    return x
"""
TOGETHER = """
from steps import lower
from others import size

both = lower >> size
"""


def test_several_files_names_and_modules_are_served_together(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "others.py").write_text(OTHERS)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(OTHERS.replace("def unused", "def third"))
    with _served(tmp_path, "steps.py", "others.py:size", "package.module:third") as port:
        _, index = _ask(port, "/v2/repository/index", {})
        assert sorted(each["name"] for each in index) == ["lower", "size", "third"]
        assert _ask(port, "/models/lower", "AB") == (200, {"output": "ab"})
        assert _ask(port, "/models/size", {"text": ["a", "bc"]}) == (200, {"output": [1, 2]})
        assert _ask(port, "/models/third", 3) == (200, {"output": 3})


def test_a_pipeline_is_an_ensemble_whose_steps_have_statistics_metrics_and_explanations(tmp_path: Path) -> None:
    for name, text in (("steps", STEPS), ("others", OTHERS), ("app", TOGETHER)):
        (tmp_path / f"{name}.py").write_text(text)
    with _served(tmp_path, "app.py") as port:
        assert _ask(port, "/models/both", {"text": ["ABC", "D"]}) == (200, {"output": [3, 1]})
        _, config = _ask(port, "/v2/models/both/config", None)
        assert config["platform"] == "ensemble"
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["lower", "size"]
        for step in ("lower", "size"):
            _, answer = _ask(port, f"/v2/models/{step}/stats", None)
            assert (answer["model_stats"][0]["inference_count"], answer["model_stats"][0]["execution_count"]) == (2, 1)
        _, metrics = _ask(port, "/v2/metrics", None)
        assert 'nv_inference_count{model="both",version="1"} 2' in metrics
        assert 'nv_inference_count{model="lower",version="1"} 2' in metrics
        for _ in range(20):
            assert _ask(port, "/models/both", {"text": "A"})[0] == 200
        status, explanation = _ask(port, "/v2/models/lower/explain", None)
        assert (status, explanation["measured"]["batch_sizes"]["1"]) == (200, 20)


TALKS = """
from collections.abc import Iterator

import numpy as np
import remora

@remora.model(isolation="thread")
def chat(messages: list[dict]) -> Iterator[str]:
    yield from (f"{each} " for each in messages[-1]["content"].upper().split())

@remora.model(isolation="thread")
async def complete(prompt: str, max_tokens: int = 3) -> str:
    return " ".join([prompt] * max_tokens)

@remora.model(batch=8, isolation="thread")
def embed(text: list[str]) -> remora.Array[np.float32, -1, 2]:
    return np.array([[len(each), each.count("a")] for each in text], np.float32)
"""


def test_functions_whose_signature_fits_answer_openais_routes(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(TALKS)
    asked = {"model": "chat", "messages": [{"role": "user", "content": "hello there"}]}
    with _served(tmp_path, "app.py", "--openai") as port:
        _, models = _ask(port, "/v1/models", None)
        assert sorted(each["id"] for each in models["data"]) == ["chat", "complete", "embed"]
        status, answer = _ask(port, "/v1/chat/completions", asked)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "HELLO THERE ")
        _, events = _ask(port, "/v1/chat/completions", {**asked, "stream": True})
        assert events.count('"content":"') >= 2
        assert events.rstrip().endswith("data: [DONE]")
        status, answer = _ask(port, "/v1/completions", {"model": "complete", "prompt": "ab", "max_tokens": 2})
        assert (status, answer["choices"][0]["text"]) == (200, "ab ab")
        status, answer = _ask(port, "/v1/embeddings", {"model": "embed", "input": ["banana", "kiwi"]})
        assert (status, [each["embedding"] for each in answer["data"]]) == (200, [[6.0, 3.0], [4.0, 0.0]])


TWICE = "import remora\n\n@remora.model(isolation='thread')\ndef twice(x: float) -> float:\n    return {factor} * x\n"
GOLDEN = {
    "tests": [
        {
            "name": "three",
            "inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [3]}],
            "outputs": [{"name": "output", "shape": [1], "datatype": "FP64", "data": [6]}],
        }
    ]
}


def test_a_change_that_fails_the_golden_tests_beside_the_file_does_not_serve(tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(TWICE.format(factor=2))
    (tmp_path / "twice.tests.json").write_text(json.dumps(GOLDEN))
    (port,) = free_ports(1)
    with process(file, port, dict(os.environ), "--reload") as server:
        until(port, "/v2/health/ready", server)
        assert _ask(port, "/models/twice", 3) == (200, {"output": 6.0})
        replace(file, TWICE.format(factor=50))
        assert server.stderr is not None
        assert any("1 differences in the golden tests" in line for line in server.stderr)
        assert _ask(port, "/models/twice", 3) == (200, {"output": 6.0})
        replace(file, "# Mended.\n" + TWICE.format(factor="(x - 1)"))
        eventually(lambda: _ask(port, "/models/twice", 5) == (200, {"output": 20.0}), process=server)
