"""Tests of ``remora_llm.backends.vllm`` with vLLM itself, in an environment that has it."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from remora import Engine
from remora.backends import Source
from remora.calls import Metrics
from remora.errors import ConfigError, NotFoundError, RemoraError
from remora.proto.model_config_pb2 import ModelConfig
from remora_llm.backends.vllm import VllmBackend, VllmModel
from remora_llm.generation.tasks import ParameterError, Sampling
from remora_llm.testing import ENGINE_CHECKS, Collector, EngineCheck, EngineExample
from support.models.generation_models import text_inputs
from support.models.hf_models import write_hf

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn while they are imported
EXAMPLE = EngineExample(prompt=tuple(range(20, 40)), other=tuple(range(50, 90)))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

TRITONS_CONFIG = """
backend: "vllm"
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""
"""The configuration in the tutorial of Triton's vLLM backend."""
ARGUMENTS = {
    "model": "weights",
    "disable_log_requests": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    (root / "tiny" / "1").mkdir(parents=True)
    (root / "tiny" / "config.pbtxt").write_text(TRITONS_CONFIG)
    (root / "tiny" / "1" / "model.json").write_text(json.dumps(ARGUMENTS))
    write_hf(root / "tiny" / "1" / "weights")
    return root


def opened(repository: Path, name: str = "tiny") -> VllmModel:
    version = repository / name / "1"
    source = Source(name, 1, version.parent, version, repository, {}, cpus=2)
    return VllmBackend().open(source, ModelConfig(name=name))


class Shared:
    """One engine for all checks, because a start takes half a minute; only the last check closes it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        """Leave it open."""


@pytest.fixture(scope="module")
def engine(repository: Path) -> Iterator[Engine]:
    with Engine(repository) as started:
        yield started


LAST = "check_closing_ends_everything"


@pytest.mark.parametrize(
    "check", [each for each in ENGINE_CHECKS if each.__name__ != LAST], ids=lambda check: check.__name__
)
def test_the_engine_passes_the_conformance_kit(check: EngineCheck, engine: Engine) -> None:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    check(lambda: Shared(generation.engine), EXAMPLE)


def ask(engine: Engine, text: str, stream: bool = False, **parameters: Any) -> list[str]:
    inputs = text_inputs(text, stream, **parameters)
    return [answer["text_output"][0].decode() for answer in engine.infer_stream("tiny", inputs)]


def test_tritons_repository_is_served_unchanged(engine: Engine) -> None:
    assert engine.resolve("tiny").config.model_transaction_policy.decoupled
    whole = ask(engine, "Once upon a time")
    parts = ask(engine, "Once upon a time", stream=True)
    assert "".join(parts) == whole[0]
    assert len(parts) > 4


def test_many_clients_share_the_engine_and_get_what_each_would_get_alone(engine: Engine) -> None:
    texts = [f"Client number {place} says" for place in range(8)]
    alone = [ask(engine, text) for text in texts]
    found: dict[str, list[str]] = {}
    threads = [threading.Thread(target=lambda text=text: found.update({text: ask(engine, text)})) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[text] for text in texts] == alone


def test_a_random_model_writes_what_a_grammar_allows(engine: Engine) -> None:
    (text,) = ask(engine, "Code:", structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}, ignore_eos=False)
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", text)
    (text,) = ask(engine, "Say", structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    assert text in ("yes", "no")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"structured_outputs": {"regex": "(["}}, "vLLM refuses the request"),
        ({"priority": 1}, "does not support priority"),
        ({"prompt_logprobs": 1}, "does not support prompt_logprobs"),
    ],
)
def test_what_vllm_or_its_adapter_cannot_do_is_refused_with_the_reason(
    engine: Engine, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(RemoraError, match=text):
        ask(engine, "Once", **changes)
    assert ask(engine, "Once")


def test_the_models_own_template_renders_a_chat(engine: Engine) -> None:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    assert generation.chat is not None
    assert generation.chat.render([{"role": "user", "content": "hi <|im_end|>"}]).count(2) == 1


def test_metrics_have_the_figures_of_vllms_scheduler(engine: Engine) -> None:
    ask(engine, "The same beginning of a prompt, long enough for some blocks " * 4)
    ask(engine, "The same beginning of a prompt, long enough for some blocks " * 4)
    rows = dict(
        line.rpartition(" ")[::2] for line in engine.perform(Metrics()).splitlines() if line.startswith("vllm:")
    )
    labels = '{engine="1",model_name="tiny"}'
    assert float(rows[f"vllm:prefix_cache_queries_total{labels}"]) > 0
    assert float(rows[f"vllm:generation_tokens_total{labels}"]) >= 24
    assert float(rows[f"vllm:num_requests_running{labels}"]) == 0


def test_a_deadline_ends_an_answer_with_what_it_has(engine: Engine) -> None:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    sink, task = Collector(), EXAMPLE.task(max_tokens=200, deadline_ns=1, sampling=Sampling(temperature=0))
    generation.engine.begin(task, sink)
    sink.wait(task)
    assert [end.reason for end in sink.ends(task)] == ["deadline"]


def test_closing_ends_everything(repository: Path) -> None:
    (check,) = [each for each in ENGINE_CHECKS if each.__name__ == LAST]
    model = opened(repository)
    first = Collector()
    task = EXAMPLE.task()
    model.generation.engine.begin(task, first)  # starts vLLM's own threads
    first.wait(task)
    check(lambda: model.generation.engine, EXAMPLE)


def test_a_bad_model_json_is_refused_with_the_argument(tmp_path: Path) -> None:
    version = tmp_path / "tiny" / "1"
    version.mkdir(parents=True)
    with pytest.raises(NotFoundError):
        opened(tmp_path)
    (version / "model.json").write_text('{"modell": "x"}')
    with pytest.raises(ConfigError, match=r"model\.json has the argument 'modell', which this version of vLLM"):
        opened(tmp_path)
    assert issubclass(ParameterError, RemoraError)
