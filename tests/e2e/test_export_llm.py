"""Command `export-llm` with the real exporter, whose packages it installs itself.

`make test-export-llm` sets TEST_EXPORT_LLM, because the first run installs 2 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from remora import Engine
from remora.cli import main
from remora_llm.export_llm import install_exporter
from remora_llm.generation.tasks import Sampling, Task
from remora_llm.testing import Collector
from support.models.hf_models import write_hf

pytestmark = [
    pytest.mark.skipif(not os.environ.get("TEST_EXPORT_LLM"), reason="installs 2 GB: run make test-export-llm"),
    pytest.mark.timeout(1800),
]
PROMPTS = [list(range(20, 20 + length)) for length in (3, 17, 64)]
TOKENS = 24
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
for prompt in json.load(sys.stdin):
    made = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, eos_token_id=None,
        pad_token_id=0, min_new_tokens=int(sys.argv[2]), max_new_tokens=int(sys.argv[2]),
    )
    print(json.dumps(made[0, len(prompt):].tolist()))
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("weights") / "tiny")


def answers(repository: Path, name: str) -> list[list[int]]:
    with Engine(repository) as engine:
        generation = engine.resolve(name).generation
        assert generation is not None
        assert generation.chat is not None
        sink, found = Collector(), []
        for prompt in PROMPTS:
            task = Task(tuple(prompt), TOKENS, Sampling(temperature=0), ignore_end=True)
            generation.engine.begin(task, sink)
            sink.wait(task)
            found.append(list(sink.tokens(task)))
        return found


def expected(weights: Path) -> list[Any]:
    """The answers of the same weights by the library transformers."""
    with tempfile.TemporaryDirectory() as scratch:
        python = install_exporter(Path(scratch))
    run = subprocess.run(
        [python, "-c", REFERENCE, weights, str(TOKENS)],
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_an_fp32_export_writes_what_the_weights_write_in_transformers(weights: Path, tmp_path: Path) -> None:
    model = tmp_path / "models" / "tiny"
    assert main(["export-llm", str(weights), "--output", str(model), "--precision", "fp32"]) == 0
    assert answers(model.parent, "tiny") == expected(weights)


def test_an_int4_export_is_smaller_and_served(weights: Path, tmp_path: Path) -> None:
    model = tmp_path / "models" / "tiny"
    assert main(["export-llm", str(weights), "--output", str(model)]) == 0
    assert [len(answer) for answer in answers(model.parent, "tiny")] == [TOKENS] * len(PROMPTS)
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (model / "1", weights)]
    assert sizes[0] < sizes[1]


def test_an_architecture_that_the_exporter_lacks_is_refused_with_another_way(
    weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    for file in weights.iterdir():
        (unknown / file.name).write_bytes(file.read_bytes())
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModelForCausalLM"]}))
    assert main(["export-llm", str(unknown), "--output", str(tmp_path / "model")]) == 1
    assert "vLLM serves others as they are" in capfd.readouterr().err
    assert not (tmp_path / "model" / "1").exists()
