"""Folders of transformers and sentence-transformers, with small models that the tests make."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT
from remora.calls import ModelMetadata
from remora.engine import Engine
from remora.errors import ConfigError, InvalidArgumentError, RemoraError

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: make test-formats")
transformers = pytest.importorskip("transformers", reason="transformers is not installed here: make test-formats")
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "anna", "in", "bern"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXTS = np.array([["good film"], ["bad bad film in bern"]], object)


def _saved(folder: Path, kind: str, **options: Any) -> Path:
    """Write a BERT model with a tokenizer of eleven words."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=32)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SIZES, **options)
    getattr(transformers, kind)(config).eval().save_pretrained(folder)
    return folder


def test_a_classifier_answers_as_its_pipeline(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "mood", "BertForSequenceClassification", id2label={0: "sad", 1: "glad"})
    with Engine(paths=[folder]) as engine:
        answer = engine.infer("mood", {"text": TEXTS})
    expected = transformers.pipeline("text-classification", model=str(folder))([str(each) for each in TEXTS.ravel()])
    assert [each.decode() for each in answer["label"].ravel()] == [each["label"] for each in expected]
    np.testing.assert_allclose(answer["score"].ravel(), [each["score"] for each in expected], rtol=1e-5)


def test_the_model_of_the_tutorial_is_served(tmp_path: Path) -> None:
    script = ROOT / "docs" / "examples" / "hugging-face" / "tiny_classifier.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "mood")], check=True, capture_output=True)
    with Engine(paths=[tmp_path / "mood"]) as engine:
        answer = engine.infer("mood", {"text": np.array([["I love it"], ["I do not"]], object)})
    assert {*answer["label"].ravel()} <= {b"NEGATIVE", b"POSITIVE"}
    assert ((answer["score"] > 0) & (answer["score"] <= 1)).all()


def test_a_token_classifier_answers_entities(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "names", "BertForTokenClassification", id2label={0: "PER", 1: "LOC"})
    with Engine(paths=[folder]) as engine:
        answer = engine.infer("names", {"text": TEXTS})["entities"]
    first, second = (json.loads(each) for each in answer.ravel())
    assert {entity["entity"] for entity in first + second} <= {"PER", "LOC"}
    assert first[0].keys() == {"entity", "score", "text", "start", "end"}
    assert second[-1]["end"] == len("bad bad film in bern")


def test_a_base_model_answers_embeddings(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "base", "BertModel")
    with Engine(paths=[folder]) as engine:
        together = engine.infer("base", {"text": TEXTS})["embedding"]
        alone = engine.infer("base", {"text": TEXTS[:1]})["embedding"]
        assert engine.perform(ModelMetadata("base")).outputs[0].shape == (-1, SIZES["hidden_size"])
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)  # padding changes nothing


def test_an_image_classifier_takes_encoded_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed here: make test-formats")
    folder = tmp_path / "pictures"
    config = transformers.ViTConfig(image_size=8, patch_size=4, id2label={0: "dark", 1: "light"}, **SIZES)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    png = io.BytesIO()
    image.new("RGB", (20, 10), "red").save(png, "PNG")
    with Engine(paths=[folder]) as engine:
        answer = engine.infer("pictures", {"image": np.array([[png.getvalue()]], object)})
        with pytest.raises(InvalidArgumentError, match="not an image"):
            engine.infer("pictures", {"image": np.array([[b"text"]], object)})
    assert answer["label"].item() in (b"dark", b"light")


def test_sentence_transformers_embed(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing: make test-formats")
    base = _saved(tmp_path / "base", "BertModel")
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules", reason="it is before version 6")
    words, pooling = parts.Transformer(str(base)), parts.Pooling(SIZES["hidden_size"])
    model = library.SentenceTransformer(modules=[words, pooling], device="cpu")
    model.save(str(tmp_path / "sentences"))
    with Engine(paths=[tmp_path / "sentences"]) as engine:
        answer = engine.infer("sentences", {"text": TEXTS})["embedding"]
        assert engine.perform(ModelMetadata("sentences")).outputs[0].shape == (-1, SIZES["hidden_size"])
    np.testing.assert_allclose(answer, model.encode([str(each) for each in TEXTS.ravel()]), atol=1e-5)


def test_other_architectures_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "mask", "BertForMaskedLM")
    with pytest.raises(RemoraError, match="architecture BertForMaskedLM; served as they are: "), Engine(paths=[folder]):
        pass


def test_weights_that_may_contain_code_are_refused(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "old", "BertModel")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="a folder of transformers without safetensors"), Engine(paths=[folder]):
        pass
