"""Command `remora export-llm`, which exports a Hugging Face model for ONNX Runtime."""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from remora.cli.arguments import bind
from remora.cli.output import UsageError
from remora.errors import InternalError

TOOLS = (
    "torch==2.13.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "gguf==0.19.0",
    "onnx==1.23.2",
    "onnx-ir==1.1.0",
    "onnxruntime==1.31.1",
    "onnxruntime-genai==0.18.0",
)
"""Packages of the exporter, which are too large and too strict about their versions to stand beside the server's."""
_WEIGHTS = ("*.safetensors", "*.bin")
_EXPORTED = "genai_config.json"


def add_export_llm(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora export-llm`."""
    parser.description = (
        "Export a folder with a language model of Hugging Face to a folder that remora serves, with "
        "onnxruntime-genai's exporter. Its packages, about 2 GB, are installed into a separate environment once."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with config.json, weights and tokenizer")
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="MODEL",
        help="folder of the model in a repository, whose version 1 is written (default: models/NAME)",
    )
    parser.add_argument(
        "--precision",
        default="int4",
        choices=("fp32", "fp16", "int4"),
        help="precision of the weights: int4 is the fastest on a CPU, fp32 the original (default %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="device that will run the model (default %(default)s)"
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=None,
        metavar="FILE",
        help="interpreter of an environment that has the exporter, for machines without a package index",
    )
    bind(parser, export_llm)


def export_llm(options: argparse.Namespace) -> int:
    """Export the model and print where it is.

    Raises UsageError for a wrong folder, InternalError if the environment or the export fails.
    """
    source: Path = options.folder.resolve()
    version = (options.output or Path("models") / _name_of(source)) / "1"
    _check(source, version)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        python = options.python or install_exporter(Path(scratch))
        version.parent.mkdir(parents=True, exist_ok=True)
        partial = version.parent / ".1.partial"  # a server that polls the repository must not load half of a model
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _run(python, source, partial, options.precision, options.device, scratch)
            partial.rename(version)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    print(f"exported: {version}\nserve it: remora serve {version.parent.parent}")
    return 0


def _name_of(source: Path) -> str:
    """Return the name of the model, which a numbered version's folder has in its parent."""
    return source.parent.name if source.name.isdecimal() else source.name


def _check(source: Path, version: Path) -> None:
    """Raise UsageError unless the source can be exported to the version's folder."""
    if (source / _EXPORTED).exists():
        raise UsageError(f"{source} has a {_EXPORTED}, so that it is exported already: serve it as it is")
    if not (source / "config.json").is_file():
        raise UsageError(f"{source} has no config.json: pass a folder of Hugging Face's save_pretrained")
    if not any(any(source.glob(pattern)) for pattern in _WEIGHTS):
        raise UsageError(f"{source} has no weights ({', '.join(_WEIGHTS)}): download the whole model, not links alone")
    if version.exists():
        raise UsageError(f"{version} exists: name another folder with --output")


def install_exporter(scratch: Path) -> Path:
    """Return an interpreter with the exporter. Raises InternalError."""
    from remora.environments import interpreter_with  # imported here, because it imports importlib.metadata

    file = scratch / "requirements.txt"
    file.write_text("".join(f"{each}\n" for each in TOOLS))
    try:
        return interpreter_with(file, "remora export-llm", {})
    except InternalError as error:
        error.add_note(
            "the exporter's packages come from a package index; without one, make an environment with them elsewhere "
            f"({' '.join(TOOLS)}) and pass its interpreter by --python"
        )
        raise


def _run(python: Path, source: Path, target: Path, precision: str, device: str, cache: str) -> None:
    """Run the exporter, whose progress goes to stderr. Raises InternalError if it fails."""
    words = ["-i", str(source), "-o", str(target), "-p", precision, "-e", device, "-c", cache]
    command = ["env", "HF_HUB_OFFLINE=1", str(python), "-m", "onnxruntime_genai.models.builder", *words]
    status = subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode
    if status or not (target / _EXPORTED).is_file():
        raise InternalError(
            f"cannot export {source}: the exporter ended with status {status}; its reason is above. It supports the "
            'architectures that onnxruntime-genai lists; vLLM serves others as they are (backend: "vllm")'
        )
