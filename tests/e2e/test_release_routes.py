"""Releases of a real server on the routes of OpenAI: one version, and its name, for each answer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from support.models.generation_models import tiny
from support.models.released_model import release, release_server
from support.servers.hosting import Got, ask

LEAST, MOST = 16, 500
"""Answers of random versions."""
FRONTS = pytest.param("--frontends=2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))
EMBED = """
backend: "python" max_batch_size: 2
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "VECTOR" data_type: TYPE_FP32 dims: 1 }
"""
EMBED_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sizes = [len(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", np.full((size, 1), {version}, np.float32))])
                for size in sizes]
"""


def _post(port: int, path: str, user: int, **body: object) -> Got:
    reply = ask(port, "POST", path, body, {"X-User": f"user {user}"})
    assert reply.status == 200, reply.body
    return reply


@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_answers_of_language_models_name_their_version(
    fronts: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    first = tiny(tmp_path / "models")
    shutil.copytree(first, first.parent / "2")
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
    with release_server(tmp_path / "models", child_environment, fronts) as port:
        assert "x-model-version" not in _post(port, "/v1/completions", 0, **body).headers
        release(port, "start", "tiny", version=1, weight="50%", sticky="header:X-User")
        found = []
        for user in range(12):
            whole, stream = (_post(port, "/v1/completions", user, **body, stream=each) for each in (False, True))
            plain = _post(port, "/v2/models/tiny/generate", user, text_input="Once", max_tokens=2)
            found.append({reply.headers["x-model-version"] for reply in (whole, stream, plain)})
        assert all(len(versions) == 1 for versions in found), found
        assert set.union(*found) == {"1", "2"}


@pytest.mark.parametrize("fronts", ["--frontends=0", FRONTS])
def test_the_vectors_of_one_answer_come_from_one_version(
    fronts: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """Vectors of two versions do not belong into one space; nine texts are five requests to the model.

    Without a client's identity each answer comes from a random version, until both have answered.
    """
    for version in (1, 2):
        folder = tmp_path / "models" / "embed" / str(version)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(EMBED_MODEL.format(version=version))
    (folder.parent / "config.pbtxt").write_text(EMBED)
    with release_server(tmp_path / "models", child_environment, fronts, "--openai") as port:
        release(port, "start", "embed", version=1, weight="50%")
        seen: list[int] = []
        while len(seen) < LEAST or len(set(seen)) < 2:
            reply = _post(port, "/v1/embeddings", len(seen), model="embed", input=["text"] * 9)
            versions = {int(row["embedding"][0]) for row in json.loads(reply.body)["data"]}
            assert {int(reply.headers["x-model-version"])} == versions
            seen += versions
            assert len(seen) < MOST, "the other version has never answered"
        arms = release(port, name="embed")["arms"]
        assert sum(arm["answers"] for arm in arms) == len(seen) * 5
