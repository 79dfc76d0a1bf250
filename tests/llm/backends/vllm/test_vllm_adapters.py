"""LoRA adapters of vLLM over OpenAI's routes and V2, with vLLM itself, in an environment that has it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: run make test-vllm")

from remora import Engine
from remora.errors import RemoraError
from remora.server.host import Host
from support.models.gguf_models import HEADS, HIDDEN, KV_HEADS, LAYERS
from support.models.hf_models import write_hf, write_safetensors
from support.servers.hosting import ask, running

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn while they are imported
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
RANK = 8
ARGUMENTS = {
    "model": "weights",
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
}


def write_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA adapter of random weights in the format of the package peft."""
    random = np.random.RandomState(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HIDDEN), ("v_proj", HIDDEN * KV_HEADS // HEADS)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = random.standard_normal((RANK, HIDDEN)).astype(np.float32)
            weights[f"{key}.lora_B.weight"] = random.standard_normal((rows, RANK)).astype(np.float32)
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", weights)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, int]]:
    root = tmp_path_factory.mktemp("served")
    version = root / "tiny" / "1"
    version.mkdir(parents=True)
    (root / "tiny" / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n')
    (version / "model.json").write_text(json.dumps(ARGUMENTS))
    write_hf(version / "weights")
    write_adapter(version / "first", 1)
    write_adapter(version / "second", 2)
    (version / "multi_lora.json").write_text(json.dumps({"first": "first", "second": "second"}))
    engine = Engine(root)
    with running(Host(), engine) as ports:
        yield engine, ports.http


def completion(port: int, model: str) -> Any:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return ask(port, "POST", "/v1/completions", body)


def test_adapters_are_listed_and_chosen_by_the_field_model(served: tuple[Engine, int]) -> None:
    _, port = served
    listed = ask(port, "GET", "/v1/models").json["data"]
    assert [row["id"] for row in listed] == ["tiny", "tiny:first", "tiny:second"]
    texts = [completion(port, name).json["choices"][0]["text"] for name in ("tiny", "tiny:first", "tiny:second")]
    assert len(set(texts)) == 3
    assert completion(port, "tiny:first").json["choices"][0]["text"] == texts[1]
    assert completion(port, "tiny:third").status == 404


def test_over_v2_the_parameter_lora_name_chooses(served: tuple[Engine, int]) -> None:
    engine, port = served

    def text(**parameters: Any) -> str:
        sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **parameters}
        inputs = {
            "text_input": np.array([b"Once upon a time"], object),
            "exclude_input_in_output": np.array([True]),
            "sampling_parameters": np.array([json.dumps(sampling).encode()], object),
        }
        (answer,) = engine.infer_stream("tiny", inputs)
        found: str = answer["text_output"][0].decode()
        return found

    assert text(lora_name="second") == completion(port, "tiny:second").json["choices"][0]["text"]
    assert text() == completion(port, "tiny").json["choices"][0]["text"]
    with pytest.raises(RemoraError, match="no adapter 'third'"):
        text(lora_name="third")
