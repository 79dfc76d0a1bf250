"""Tests of ``remora_llm.backends.onnx.onnx_stepper`` with a real graph on ONNX Runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.errors import ConfigError
from remora.tensors.device import HOST, CudaMemory, memory_of
from remora_llm.backends.onnx.folder import read_folder
from remora_llm.backends.onnx.onnx_stepper import CacheSize, OnnxStepper, cache_type, token_bytes
from remora_llm.generation import Extension, Logits
from remora_llm.generation.planner import Planner, PlannerLimits
from remora_llm.generation.tasks import ModelFacts
from support.models.cuda_stand_in import StandIn
from support.models.generation_models import tiny

RANDOM = np.random.default_rng(1)
PROMPTS = [
    RANDOM.integers(3, 256, size).tolist() for size in (5, 119, 1, 64, 33, 17, 80, 2, 100, 7, 12, 50, 90, 3, 28, 41)
]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import onnxruntime

    folder = tiny(tmp_path_factory.mktemp("models"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    return folder, onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])


@pytest.fixture
def stepper(session: Any) -> Iterator[OnnxStepper]:
    path, inner = session
    folder = read_folder(path, "tiny")
    facts = ModelFacts(folder.context, folder.vocabulary)
    dtype = cache_type(inner, folder, "tiny")
    made = OnnxStepper(inner, folder, CacheSize(18, 256), 129, facts, memory_of(HOST), dtype)
    yield made
    made.close()


def step(stepper: OnnxStepper, *extensions: Extension) -> list[Logits]:
    return [logits.copy() for logits in stepper.step(extensions).logits]


def whole(stepper: OnnxStepper, row: int, prompt: list[int]) -> Logits:
    (logits,) = step(stepper, Extension(row, 0, prompt))
    return logits


def in_parts(stepper: OnnxStepper, row: int, prompt: list[int], part: int) -> Logits:
    """Read a prompt in the parts that the planner makes."""
    limits = PlannerLimits(rows=2, sequences=1, cache_tokens=1 << 20, prefill_chunk=part, step_tokens=part)
    planner, at = Planner(limits), 0
    while at < len(prompt):
        size = planner._part(len(prompt) - at, part, must=True)
        (logits,) = step(stepper, Extension(row, at, prompt[at : at + size]))
        at += size
    return logits


def test_a_prompt_has_the_same_bits_whatever_parts_it_is_read_in(stepper: OnnxStepper) -> None:
    for length in (*range(1, 40), 63, 64, 65, 66, 97, 113, 127, 128, 129, 130):
        prompt = RANDOM.integers(3, 500, length).tolist()
        expected = in_parts(stepper, 0, prompt, 128)
        for part in (2, 3, 4, 7, 16, 33, 64, 65, 97):
            assert np.array_equal(in_parts(stepper, 1, prompt, part), expected), f"{length} tokens, parts of {part}"


@pytest.mark.parametrize("count", [2, 3, 5, 8, 13, 16])
def test_a_decode_step_has_the_same_bits_alone_and_among_others(stepper: OnnxStepper, count: int) -> None:
    alone = []
    for prompt in PROMPTS[:count]:
        whole(stepper, 0, prompt)
        alone.append(step(stepper, Extension(0, len(prompt), [9]))[0])
    for row, prompt in enumerate(PROMPTS[:count]):
        whole(stepper, row, prompt)
    together = step(stepper, *(Extension(row, len(PROMPTS[row]), [9]) for row in range(count)))
    for row in range(count):
        assert np.array_equal(together[row], alone[row]), f"row {row} of {count}"


def test_a_copied_row_continues_as_its_source(stepper: OnnxStepper) -> None:
    prompt = PROMPTS[1]
    expected = whole(stepper, 0, prompt)
    stepper.copy(0, 5, 60)
    whole(stepper, 0, PROMPTS[3])
    (logits,) = step(stepper, Extension(5, 60, prompt[60:]))
    assert np.array_equal(logits, expected)


def test_a_step_reads_prompts_and_decodes_in_any_order(stepper: OnnxStepper) -> None:
    expected = whole(stepper, 4, PROMPTS[4])
    for row in range(2):
        whole(stepper, row, PROMPTS[row])
    alone = [step(stepper, Extension(row, len(PROMPTS[row]), [9]))[0] for row in range(1)]
    mixed = step(
        stepper,
        Extension(1, len(PROMPTS[1]), [9], 0),
        Extension(3, 0, PROMPTS[4]),
        Extension(0, len(PROMPTS[0]), [9]),
    )
    assert [logits.shape[0] for logits in mixed] == [0, 1, 1]
    assert np.array_equal(mixed[1], expected)
    assert np.array_equal(mixed[2], alone[0])


def test_all_positions_of_a_prompt_can_be_wanted(stepper: OnnxStepper) -> None:
    prompt = PROMPTS[5]
    (logits,) = step(stepper, Extension(0, 0, prompt, len(prompt)))
    assert logits.shape == (len(prompt), stepper.facts.vocabulary)
    assert np.array_equal(logits[-1:], whole(stepper, 0, prompt))
    few = len(prompt) - 4
    assert np.array_equal(logits[few - 1 : few], whole(stepper, 0, prompt[:few]))


def test_a_graph_that_does_not_fit_the_folder_is_refused(session: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    path, inner = session
    folder = read_folder(path, "tiny")
    assert token_bytes(folder, 4) == 2 * 2 * 2 * 16 * 4
    with pytest.raises(ConfigError, match=r"no tensor 'past_key_values\.9\.key'"):
        cache_type(inner, replace(folder, past=(*folder.past, "past_key_values.9.key")), "tiny")
    with pytest.raises(ConfigError, match="3 heads of 16"):
        cache_type(inner, replace(folder, kv_heads=3), "tiny")
    with pytest.raises(ConfigError, match="input 'attention_mask' that is not supported"):
        cache_type(inner, replace(folder, input_names={**folder.input_names, "attention_mask": "input_ids"}), "tiny")


def test_a_cache_on_a_gpu_is_zero_at_first(session: Any, stand_in: StandIn) -> None:
    """A kernel that multiplies masked values with zero keeps the NaN that fresh memory may hold."""
    path, inner = session
    folder = read_folder(path, "tiny")
    facts, size = ModelFacts(folder.context, folder.vocabulary), CacheSize(2, 16)
    memory, dtype = CudaMemory(stand_in.runtime, 0), cache_type(inner, folder, "tiny")
    made = OnnxStepper(inner, folder, size, 1, facts, memory, dtype)
    nbytes = size.nbytes(folder, dtype.itemsize) // len(made._cache.buffers)
    assert [ctypes.string_at(each.address, nbytes) for each in made._cache.buffers] == [bytes(nbytes)] * len(
        made._cache.buffers
    )
    made.close()
