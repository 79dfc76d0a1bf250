"""Tests of ``remora_llm.backends.openvino_genai`` with the library itself; `make test-openvino` has it installed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora import Engine
from remora.backends import Source
from remora.errors import ConfigError, InternalError, NotFoundError, RemoraError
from remora.proto.model_config_pb2 import ModelConfig
from remora_llm.backends.openvino_genai import OpenVinoGenAiBackend, OpenVinoGenAiModel
from remora_llm.generation.tasks import ParameterError, Sampling, Task
from remora_llm.testing import ENGINE_CHECKS, Collector, EngineCheck, EngineExample
from support.models.generation_models import text_inputs
from support.models.gguf_models import write_gguf

pytest.importorskip("openvino_genai", reason="OpenVINO GenAI is not installed")

EXAMPLE = EngineExample(prompt=tuple(range(20, 40)), other=tuple(range(50, 90)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny" / "1" / "model.gguf")


def opened(file: Path, **parameters: str) -> OpenVinoGenAiModel:
    config = ModelConfig(name="tiny")
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    version = file.parent
    source = Source("tiny", 1, version.parent, version, version.parent.parent, {}, cpus=2)
    return OpenVinoGenAiBackend().open(source, config)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_engine_passes_the_conformance_kit(check: EngineCheck, file: Path) -> None:
    model = opened(file, max_sequences="4")
    check(lambda: model.generation.engine, EXAMPLE)


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[Engine]:
    with Engine(file.parent.parent.parent) as started:
        yield started


def ask(engine: Engine, text: str, stream: bool = False, **parameters: Any) -> list[bytes]:
    inputs = text_inputs(text, stream, **parameters)
    return [answer["text_output"][0] for answer in engine.infer_stream("tiny", inputs)]


def test_a_gguf_file_is_served_without_a_configuration(engine: Engine) -> None:
    config = engine.resolve("tiny").config
    assert config.backend == "openvino_genai"
    assert config.model_transaction_policy.decoupled
    assert config.instance_group[0].count == 32
    whole = ask(engine, "Once upon a time")
    parts = ask(engine, "Once upon a time", stream=True)
    assert b"".join(parts) == whole[0]
    assert len(parts) > 4


def test_its_tokenizer_keeps_special_tokens_of_users_as_text(engine: Engine) -> None:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    tokens, text = generation.tokens, "a <|im_end|> b \u00e9\U0001f600"
    assert 2 in tokens.encode(text)
    assert 2 not in tokens.encode(text, parse_special=False)
    assert tokens.decode(tokens.encode(text, parse_special=False)) == text
    assert tokens.decode(tokens.encode(text)) == text.replace("<|im_end|>", "")
    with pytest.raises(ParameterError, match="lone surrogate"):
        tokens.encode("\ud800")
    with pytest.raises(ParameterError, match="beyond the vocabulary"):
        tokens.decode([100_000])


def test_the_models_own_template_renders_a_chat(engine: Engine) -> None:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    assert generation.chat is not None
    prompt = generation.chat.render([{"role": "user", "content": "hi <|im_end|>"}])
    assert prompt.count(2) == 1
    assert generation.tokens.decode(prompt, skip_special=False).startswith("<|im_start|>user\nhi <|im_end|>")


def test_many_clients_share_the_library_and_each_gets_its_own_answer(engine: Engine) -> None:
    found: dict[int, list[bytes]] = {}
    threads = [
        threading.Thread(target=lambda place=place: found.update({place: ask(engine, f"Client {place}", n=1)}))
        for place in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))
    assert all(len(answer) == 1 and answer[0] for answer in found.values())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"structured_outputs": {"regex": "(["}}, "this model's engine cannot enforce a regex"),
        ({"structured_outputs": {"json_object": True}}, "this model's engine cannot enforce a json_object"),
        ({"logit_bias": {"5": 1}}, "does not support logit_bias"),
        ({"logprobs": 2}, "logprobs is 2; it must be between 0 and 0"),
        ({"priority": 1}, "does not support priority"),
    ],
)
def test_what_the_library_cannot_do_is_refused_by_name(engine: Engine, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RemoraError, match=text):
        ask(engine, "Once", **changes)


def test_a_step_that_raises_ends_its_tasks_with_the_reason_and_the_model_serves_on(file: Path) -> None:
    model = opened(file)
    engine: Any = model.generation.engine
    pipeline = engine._pipeline

    class Broken:
        def step(self) -> None:
            raise RuntimeError("planted")

        def __getattr__(self, name: str) -> Any:
            return getattr(pipeline, name)

    engine._pipeline = Broken()
    sink, task = Collector(), EXAMPLE.task()
    engine.begin(task, sink)
    sink.wait(task)
    (end,) = sink.ends(task)
    assert isinstance(end.error, InternalError)
    assert "planted" in str(end.error)
    again = EXAMPLE.task()
    engine.begin(again, sink)
    sink.wait(again)
    assert sink.ends(again)[0].reason == "length"
    model.close()


def test_a_deadline_ends_an_answer_with_what_it_has(file: Path) -> None:
    model = opened(file)
    engine = model.generation.engine
    sink = Collector()
    warm = EXAMPLE.task()
    engine.begin(warm, sink)
    sink.wait(warm)
    task = Task(EXAMPLE.prompt, 400, Sampling(temperature=0), ignore_end=True, deadline_ns=1)
    engine.begin(task, sink)
    sink.wait(task)
    assert [end.reason for end in sink.ends(task)] == ["deadline"]
    model.close()


def test_bad_files_and_parameters_are_refused_with_the_reason(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="OpenVINO GenAI has no parameter 'prefill_chunk'"):
        opened(file, prefill_chunk="64")
    with pytest.raises(ConfigError, match="parameter context_length is 1024, the model has 512"):
        opened(file, context_length="1024")
    bad = tmp_path / "tiny" / "1" / "model.gguf"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"model\.gguf is not a GGUF file: it does not begin with GGUF"):
        opened(bad)
    bad.unlink()
    with pytest.raises(NotFoundError):
        opened(bad)


def test_a_folder_as_the_exporter_writes_it_gives_the_same_answers(file: Path, tmp_path: Path) -> None:
    import openvino_genai

    version = tmp_path / "tiny" / "1"
    copy = write_gguf(version / "model.gguf")
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    copy.unlink()
    limits = {"max_position_embeddings": 512, "eos_token_id": 2}
    (version / "config.json").write_text(json.dumps(limits))
    assert (version / "openvino_model.xml").is_file()
    answers = []
    for each in (file, copy):
        model = opened(each)
        sink, task = Collector(), EXAMPLE.task()
        model.generation.engine.begin(task, sink)
        sink.wait(task)
        answers.append(sink.tokens(task))
        model.close()
    assert answers[0] == answers[1]
