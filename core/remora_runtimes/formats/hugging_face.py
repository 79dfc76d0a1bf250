"""Folders that transformers and sentence-transformers write with ``save_pretrained``.

The architecture in ``config.json`` selects the task; the weights are read when an instance starts. Nothing is
downloaded, and code in the folder is not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np

from remora.api.functions import InputField, Model, OutputField, Settings, Signature, kind_of, open_image
from remora.model_files import leaves_folder
from remora.system.json_text import read_json
from remora_runtimes.formats import needed, rows_of

_BATCH = 32
_SETTINGS = Settings(batch=_BATCH, max_delay_s=0.001)


class Label(TypedDict):
    """The most likely class of each item."""

    label: list[str]
    score: list[float]


class Entities(TypedDict):
    """The entities of each text, as a JSON list of objects."""

    entities: list[list[dict]]  # type: ignore[type-arg]


def _transformers(folder: Path) -> Any:
    """Return the library, without the progress bars that it would write into the server's log."""
    module = needed("transformers", folder)
    module.utils.logging.disable_progress_bar()
    return module


class _Pipeline:
    """Task of a pipeline of transformers."""

    folder: ClassVar[Path]
    task: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def setup(self, device: str) -> None:
        """Load the weights onto a device."""
        self._pipeline = _transformers(self.folder).pipeline(
            self.task,
            model=str(self.folder),
            device=device,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
            **self.options,
        )


class TextClassification(_Pipeline):
    """Classes of texts."""

    task = "text-classification"

    def predict(self, text: list[str]) -> Label:
        """Return the most likely class of each text."""
        return _labels(self._pipeline(text, batch_size=_BATCH, truncation=True))


class TokenClassification(_Pipeline):
    """Entities in texts."""

    task = "token-classification"
    options: ClassVar[dict[str, Any]] = {"aggregation_strategy": "simple"}

    def predict(self, text: list[str]) -> Entities:
        """Return the entities of each text with class, score, text and position in characters."""
        found = self._pipeline(text, batch_size=_BATCH)
        return {"entities": [[_entity(each) for each in entities] for entities in found]}


class ImageClassification(_Pipeline):
    """Classes of images."""

    task = "image-classification"

    def predict(self, image: list[bytes]) -> Label:
        """Return the most likely class of each encoded image."""
        images = [open_image(each).convert("RGB") for each in image]
        return _labels([each[0] for each in self._pipeline(images, batch_size=_BATCH, top_k=1)])


_TASKS: dict[str, type[_Pipeline]] = {
    "ForSequenceClassification": TextClassification,
    "ForTokenClassification": TokenClassification,
    "ForImageClassification": ImageClassification,
}


def define(folder: Path, name: str, trusted: bool) -> Model:
    """Describe a folder by its ``config.json`` or ``modules.json``.

    Raises ValueError for an architecture without a task here, and for a file that is outside of the folder.
    """
    del trusted  # safetensors contain no code
    _check_named_files(folder)
    if (folder / "modules.json").is_file():
        return _embeddings(folder, name, _Sentences, _sentence_size(folder))
    config = read_json((folder / "config.json").read_bytes())
    architecture = next(iter(config.get("architectures") or ()), "")
    for suffix, kind in _TASKS.items():
        if architecture.endswith(suffix):
            return Model(type(kind.__name__, (kind,), {"folder": folder}), name, _SETTINGS)
    if architecture.endswith("Model") and (folder / "tokenizer_config.json").is_file():
        size = next((config[key] for key in ("hidden_size", "dim", "d_model") if key in config), -1)
        return _embeddings(folder, name, _MeanPooling, size)
    raise ValueError(
        f"'{folder}' has the architecture {architecture or 'of no name'}; served as they are: "
        f"{', '.join('*' + each for each in _TASKS)}, *Model with a tokenizer, and folders of sentence-transformers. "
        "For others, write an app.py with @remora.model (remora init DIR --template hugging-face)"
    )


def _check_named_files(folder: Path) -> None:
    """Raise ValueError if a file of the folder names another one outside of it."""
    for index in (folder / "modules.json", *sorted(folder.glob("*.index.json"))):
        if not index.is_file():
            continue
        for each in map(str, _named_in(read_json(index.read_bytes()))):
            if "\0" in each or leaves_folder(each):
                raise ValueError(f"'{index}' names '{each[:200]}', which is outside of the folder: save it again")


def _named_in(index: Any) -> list[Any]:
    """Return the paths in an index of weights or in a list of modules."""
    if isinstance(index, list):
        return [each.get("path", "") for each in index if isinstance(each, dict)]
    weights = index.get("weight_map") if isinstance(index, dict) else None
    return list(weights.values()) if isinstance(weights, dict) else []


def _embeddings(folder: Path, name: str, kind: type, size: int) -> Model:
    signature = Signature(
        (InputField("text", kind_of(list[str], batched=True), False),),
        (OutputField("embedding", rows_of(np.float32, size)),),
        lambda result: (result,),
        False,
    )
    return Model(type(kind.__name__, (kind,), {"folder": folder}), name, _SETTINGS, signature=signature)


class _Sentences:
    """Embeddings by sentence-transformers."""

    folder: ClassVar[Path]

    def setup(self, device: str) -> None:
        """Load the weights onto a device."""
        module = needed("sentence_transformers", self.folder)
        _transformers(self.folder)
        self._model = module.SentenceTransformer(
            str(self.folder), device=device, trust_remote_code=False, local_files_only=True
        )

    def predict(self, text: list[str]) -> Any:
        """Return the embedding of each text."""
        return self._model.encode(text, batch_size=_BATCH, convert_to_numpy=True, show_progress_bar=False)


class _MeanPooling:
    """Mean of the last hidden states of a text's tokens."""

    folder: ClassVar[Path]

    def setup(self, device: str) -> None:
        """Load the weights onto a device."""
        transformers = _transformers(self.folder)
        self._torch = needed("torch", self.folder)
        self._device = device
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(self.folder, local_files_only=True, use_safetensors=True)
        self._model = model.to(device).eval()

    def predict(self, text: list[str]) -> Any:
        """Return the embedding of each text."""
        tokens = self._tokenizer(text, padding=True, truncation=True, return_tensors="pt").to(self._device)
        with self._torch.inference_mode():
            hidden = self._model(**tokens).last_hidden_state
        weights = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return ((hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)).float().cpu().numpy()


def _sentence_size(folder: Path) -> int:
    """Return the size of sentence-transformers' embeddings, -1 if no module names it."""
    size = -1
    for module in read_json((folder / "modules.json").read_bytes()):
        config = folder / str(module.get("path", "")) / "config.json"
        if not config.is_file() or not config.resolve().is_relative_to(folder.resolve()):
            continue
        found = read_json(config.read_bytes())
        keys = ("out_features", "embedding_dimension", "word_embedding_dimension")
        size = next((found[key] for key in keys if isinstance(found.get(key), int)), size)
    return size


def _labels(found: list[dict[str, Any]]) -> Label:
    return {
        "label": [each["label"] for each in found],
        "score": [float(each["score"]) for each in found],
    }


def _entity(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "entity": found["entity_group"],
        "score": float(found["score"]),
        "text": found["word"],
        "start": found["start"],
        "end": found["end"],
    }
