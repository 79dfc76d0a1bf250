"""Tests of ``remora_llm.backends.onnx``: a language model served as an ordinary decoupled model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora import Engine
from remora.backends import Source
from remora.errors import ConfigError, InvalidArgumentError, NotFoundError, RemoraError
from remora.proto.model_config_pb2 import ModelConfig
from remora_llm.backends.onnx import GenerationBackend, GenerationModel
from remora_llm.generation import Extension, StepResult, TokenEngine
from remora_llm.generation.tasks import Sampling, Task
from remora_llm.testing import ENGINE_CHECKS, Collector, EngineCheck, EngineExample
from support.models.generation_models import tiny
from support.process.eventually import eventually
from support.process.held import Held

EXAMPLE = EngineExample(prompt=tuple(range(40, 70)), other=tuple(range(100, 200)))


def opened(folder: Path, **parameters: str) -> GenerationModel:
    config = ModelConfig(name="tiny")
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    source = Source("tiny", 1, folder.parent, folder, folder.parent.parent, {}, 2)
    return GenerationBackend().open(source, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_engine_passes_the_conformance_kit(check: EngineCheck, folder: Path) -> None:
    models: list[GenerationModel] = []

    def open_engine() -> TokenEngine:
        models.append(opened(folder))
        return models[-1].generation.engine

    check(open_engine, EXAMPLE)


def test_answers_have_the_same_bits_alone_in_company_and_after_preemption(folder: Path) -> None:
    random = np.random.default_rng(5)
    prompts = [tuple(random.integers(3, 500, size).tolist()) for size in (1, 2, 40, 129, 17, 64, 90, 33)]

    def tasks() -> list[Task]:
        return [
            Task(prompt, 40, Sampling(0.9, top_k=40, seed=place), logprobs=3, ignore_end=True, user=f"{place % 3}")
            for place, prompt in enumerate(prompts)
        ]

    def answers(sink: Collector, done: list[Task]) -> list[Any]:
        return [(sink.tokens(task), sink.logprobs(task), sink.text(task)) for task in done]

    model = opened(folder)
    engine, sink, alone = model.generation.engine, Collector(), tasks()
    for task in alone:
        engine.begin(task, sink)
        sink.wait(task)
    expected = answers(sink, alone)
    model.close()
    for parameters in ({}, {"prefix_cache": "0"}, {"kv_cache_tokens": "260", "prefill_chunk": "32"}):
        model = opened(folder, **parameters)
        engine = model.generation.engine
        for _ in range(2):  # the second time, the prompts have been seen
            sink, company = Collector(), tasks()
            for task in company:
                engine.begin(task, sink)
            for task in company:
                sink.wait(task)
            assert answers(sink, company) == expected, parameters
        stats = engine.stats()
        assert (stats.prefix_hits > 0) == ("prefix_cache" not in parameters)
        assert (stats.preemptions > 0) == ("kv_cache_tokens" in parameters)
        model.close()


# -- As a V2 model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("served")
    tiny(root)
    with Engine(root) as started:
        yield started


def inputs(text: str = "Once", stream: bool = False, **more: Any) -> dict[str, Any]:
    parameters = more.pop("sampling_parameters", {"max_tokens": 12, "temperature": 0, "ignore_eos": True})
    made = {
        "text_input": np.array([text.encode()], object),
        "stream": np.array([stream]),
        "sampling_parameters": np.array([json.dumps(parameters).encode()], object),
    }
    return made | {name: np.array([value]) for name, value in more.items()}


def test_a_folder_without_a_configuration_is_a_decoupled_model_with_the_tensors_of_tritons_vllm_backend(
    engine: Engine,
) -> None:
    config = engine.resolve("tiny").config
    assert config.backend == "generation"
    assert config.model_transaction_policy.decoupled
    assert [row.name for row in config.input if not row.optional] == ["text_input"]
    assert [row.name for row in config.output][:2] == ["text_output", "finish_reason"]
    assert config.instance_group[0].count == 32


def test_a_request_is_answered_whole_with_its_prompt_before_it(engine: Engine) -> None:
    (answer,) = engine.infer_stream("tiny", inputs())
    text = answer["text_output"][0].decode()
    assert text.startswith("Once")
    (short,) = engine.infer_stream("tiny", inputs(exclude_input_in_output=True))
    assert short["text_output"][0].decode() == text.removeprefix("Once")
    assert list(answer) == ["text_output"]


def test_a_streamed_answer_joins_to_the_whole_one(engine: Engine) -> None:
    whole = [answer["text_output"][0] for answer in engine.infer_stream("tiny", inputs(exclude_input_in_output=True))]
    more = {"return_finish_reason": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    parts = list(engine.infer_stream("tiny", inputs(stream=True, **more)))
    assert b"".join(part["text_output"][0] for part in parts) == whole[0]
    assert len(parts) > 1
    reasons = [part["finish_reason"][0] for part in parts]
    assert reasons[-1] == b"length"
    assert set(reasons[:-1]) == {b"None"}
    assert sum(int(part["num_output_tokens"][0]) for part in parts) == 12
    assert {int(part["num_input_tokens"][0]) for part in parts} == {len(_encode(engine, "Once"))}


def _encode(engine: Engine, text: str) -> tuple[int, ...]:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    return generation.tokens.encode(text)


def test_choices_and_log_probabilities_are_returned_on_request(engine: Engine) -> None:
    parameters = {"max_tokens": 5, "n": 3, "seed": 1, "logprobs": 2, "ignore_eos": True}
    more = {"return_logprobs": True, "return_cumulative_logprob": True}
    (answer,) = engine.infer_stream("tiny", inputs(sampling_parameters=parameters, **more))
    assert len(set(answer["text_output"].tolist())) == 3
    for text, total in zip(answer["logprobs"], answer["cumulative_logprob"], strict=True):
        rows = json.loads(text)
        assert len(rows) == 5
        assert all(2 <= len(row) <= 3 for row in rows)
        assert all(value["logprob"] <= 0 and value["rank"] >= 1 for row in rows for value in row.values())
        assert total <= 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"sampling_parameters": {"max_tokens": 5, "temprature": 1}},
            "temprature is not known; did you mean temperature",
        ),
        ({"sampling_parameters": {"max_tokens": 10_000}}, "the context of the model has 512"),
        ({"sampling_parameters": {"top_p": "many"}}, "top_p is 'many'; it must be a number"),
        ({"sampling_parameters": [1]}, "must be a JSON object"),
        ({"stream": True, "exclude_input_in_output": False}, "When streaming"),
        ({"text": ""}, "the prompt is empty"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(engine: Engine, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        list(engine.infer_stream("tiny", inputs(**changes)))


def hold_steps(engine: Any, monkeypatch: pytest.MonkeyPatch, until: Callable[[], object]) -> None:
    """Let the engine of `tiny` compute ten steps, and more only after a condition is true."""
    step, done = engine._stepper.step, list[StepResult]()

    def held(extensions: Sequence[Extension]) -> StepResult:
        if len(done) == 10:
            eventually(until)
        done.append(step(extensions))
        return done[-1]

    monkeypatch.setattr(engine._stepper, "step", held)


def test_a_client_that_leaves_frees_its_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    steps: Any = generation.engine
    hold_steps(steps, monkeypatch, lambda: steps._book.cancelled)
    stream = engine.infer_stream(
        "tiny", inputs(stream=True, sampling_parameters={"max_tokens": 500, "ignore_eos": True})
    )
    next(stream)
    stream.close()
    eventually(lambda: generation.engine.stats().running == 0)
    assert generation.engine.stats().ended["cancelled"] == 1


def test_many_clients_share_the_steps_and_get_what_each_would_get_alone(engine: Engine) -> None:
    texts = [f"Client number {place} says" for place in range(12)]
    alone = [next(iter(engine.infer_stream("tiny", inputs(text))))["text_output"][0] for text in texts]
    found: dict[str, bytes] = {}

    def ask(text: str) -> None:
        (answer,) = engine.infer_stream("tiny", inputs(text))
        found[text] = answer["text_output"][0]

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[text] for text in texts] == alone


def test_unloading_ends_what_runs_and_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path)
    before = Held.now()
    with Engine(tmp_path) as engine:
        generation = engine.resolve("tiny").generation
        assert generation is not None
        steps: Any = generation.engine
        hold_steps(steps, monkeypatch, lambda: steps._closing)
        sink = Collector()
        task = Task((50, 51), 400, ignore_end=True)
        generation.engine.begin(task, sink)
        sink.wait_for_tokens(task, 1)
    (end,) = sink.ends(task)
    assert end.error is not None
    assert "unloaded" in end.error.message
    assert before.grown()[0] == []


# -- Bad folders ------------------------------------------------------------------------------------------------------


def test_a_folder_of_hugging_face_without_an_export_is_refused_with_the_command(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "config.json").write_text("{}")
    (version / "model.safetensors").write_bytes(b"")
    with pytest.raises(RemoraError, match=r"Export it: remora export-llm /.*/m/1 --output REPOSITORY/NAME"):
        Engine(tmp_path).start()


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    version = tiny(tmp_path)
    (version / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
        opened(version)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {}}, "no object 'decoder'"),
        ({"vocab_size": 0}, "'vocab_size'"),
        ({"vocab_size": 100}, "tokenizer has"),
        ({"filename": "../model.onnx"}, "leaves the folder"),
        ({"filename": "other.onnx"}, "not in the folder"),
        ({"vision": {}}, "part 'vision'"),
        ({"num_hidden_layers": 3}, "past_key_values.2.key"),
    ],
)
def test_a_description_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    version = tiny(tmp_path)
    path = version / "genai_config.json"
    document = json.loads(path.read_text())
    for key, value in change.items():
        part = document if key == "model" else document["model"]
        if key in ("filename", "num_hidden_layers"):
            part = part["decoder"]
        part[key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=text):
        opened(version)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"max_sequences": "0"}, None),
        ({"max_sequences": "1000"}, "1 to 256"),
        ({"context_length": "5000"}, "the model has 512"),
        ({"tool_parser": "other"}, "hermes"),
        ({"prefix_cache": "maybe"}, "true or false"),
    ],
)
def test_parameters_are_checked_at_load(folder: Path, parameters: dict[str, str], text: str | None) -> None:
    if text is None:
        opened(folder, **parameters).close()  # 0 is the default
        return
    with pytest.raises(ConfigError, match=text):
        opened(folder, **parameters)


def test_a_batch_size_in_the_configuration_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path, config="max_batch_size: 8")
    with Engine(tmp_path, strict_readiness=False, exit_on_error=False) as engine, pytest.raises(RemoraError):
        engine.infer("tiny", inputs())


def test_a_chat_is_rendered_by_the_models_own_template_and_answered(engine: Engine) -> None:
    generation = engine.resolve("tiny").generation
    assert generation is not None
    assert generation.chat is not None
    prompt = generation.chat.render([{"role": "user", "content": "Hello"}], tools=[{"name": "f"}])
    assert generation.tokens.decode(prompt, skip_special=False).endswith("<|im_start|>assistant\n")
    task = Task(prompt, 10, Sampling(temperature=0))
    sink = Collector()
    generation.engine.begin(task, sink)
    sink.wait(task)
    assert sink.text(task)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_model_writes_valid_json_under_a_schema(engine: Engine, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    parameters = {"max_tokens": 300, "seed": seed, "structured_outputs": {"json": schema}}
    (answer,) = engine.infer_stream(
        "tiny", inputs(sampling_parameters=parameters, exclude_input_in_output=True, return_finish_reason=True)
    )
    found = json.loads(answer["text_output"][0])
    assert set(found) == {"name", "size"}
    assert answer["finish_reason"].tolist() == [b"stop"]


def test_a_template_with_a_syntax_error_is_refused_at_load(tmp_path: Path) -> None:
    version = tiny(tmp_path)
    (version / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="chat template, line 1"):
        opened(version)


def test_another_template_of_the_folder_can_be_chosen(tmp_path: Path) -> None:
    version = tiny(tmp_path)
    (version / "short.jinja").write_text("{{ messages[0].content }}")
    model = opened(version, chat_template="short.jinja")
    assert model.generation.chat is not None
    assert model.generation.tokens.decode(model.generation.chat.render([{"content": "Hi"}])) == "Hi"
    model.close()
    with pytest.raises(ConfigError, match="leaves the folder"):
        opened(version, chat_template="../../secret")


def test_weights_outside_of_the_models_folder_are_the_models_fault(tmp_path: Path) -> None:
    import onnx

    folder = tiny(tmp_path)
    graph = onnx.load(str(folder / "model.onnx"))
    onnx.save(graph, str(folder / "model.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=0)
    (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes().replace(b"weights.bin", b"/etc/passwd"))
    with pytest.raises(InvalidArgumentError, match="outside of the model's folder"):
        opened(folder)


def test_a_graph_of_a_newer_opset_is_explained(tmp_path: Path) -> None:
    import onnx

    folder = tiny(tmp_path)
    graph = onnx.load(str(folder / "model.onnx"))
    graph.opset_import[0].version = 999
    onnx.save(graph, str(folder / "model.onnx"))
    with pytest.raises(RemoraError, match=r"onnx runtime error.*export the model for an older opset"):
        opened(folder)
