"""Log probabilities of OpenAI's routes as lm-eval reads them, equal to those of the same model in process.

`make test-openai-scores` creates the environment; without it the test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from conftest import Serving
from remora import Engine
from remora_llm.generation import Generation
from remora_llm.generation.tasks import Task
from remora_llm.testing import Collector
from support.models.generation_models import ROOT, tiny

PYTHON = Path(os.environ.get("LM_EVAL_PYTHON", ROOT / ".venv-lm-eval" / "bin" / "python"))
PATIENCE_S = 240.0
PAIRS = [
    ("The server answers", " each request once"),
    ("A batch runs when", " it is full, or when its oldest request has waited long enough"),
    ("x", " y"),
    ("Tokens of several bytes: äöü €", " and more: 漢字 🙂"),
    ("The same context", " first"),
    ("The same context", " second continuation"),
]


def in_process(generation: Generation, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The loglikelihood of a continuation, and whether each of its tokens is the likeliest."""
    sink, task = Collector(), Task((*context, *continuation), 0, prompt_logprobs=0)
    generation.engine.begin(task, sink)
    sink.wait(task)
    (scores,) = [piece.prompt_logprobs for piece in sink.pieces if piece.prompt_logprobs]
    own = [each for each in scores[len(context) :] if each is not None]
    assert [each.token for each in own] == continuation[len(continuation) - len(own) :]
    return sum(each.logprob for each in own), all(each.rank == 1 for each in own)


def test_loglikelihoods_of_lm_eval_are_those_of_the_model_in_process(serving: Serving, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run make test-openai-scores")
    folder = tiny(tmp_path / "models")
    with serving(tmp_path / "models", "--allow-grpc=false") as server:
        run = subprocess.run(
            [
                PYTHON,
                ROOT / "tests" / "support" / "programs" / "openai_judges.py",
                f"http://127.0.0.1:{server.http}/v1",
                "tiny",
                folder,
            ],
            input=json.dumps(PAIRS),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"},
        )
    assert run.returncode == 0, run.stderr[-4000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    assert len(rows) == len(PAIRS)
    with Engine(tmp_path / "models") as engine:
        generation = engine.resolve("tiny").generation
        assert generation is not None
        for context, continuation, score, greedy in rows:
            expected, likeliest = in_process(generation, context, continuation)
            assert score == pytest.approx(expected, abs=1e-4)
            assert greedy == likeliest
