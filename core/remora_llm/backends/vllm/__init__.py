"""Backend for language models on vLLM, with the ``model.json`` of Triton's vLLM backend.

``model.json`` in the version's directory has the arguments of vLLM's ``AsyncEngineArgs``. vLLM schedules, samples and
keeps the cache by itself, in processes that it starts; see `remora_llm.backends.vllm.engine`.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import Any

from remora.api.system import start_vllm_processes_afresh
from remora.backends import Instance, Placement, Source
from remora.backends.model_files import import_framework, model_path, require_file
from remora.errors import ConfigError, InternalError
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.clock import SystemClock
from remora_llm.backends.onnx.folder import read_object
from remora_llm.backends.onnx.settings import GenerationSettings, parse_settings
from remora_llm.backends.onnx.tensors import complete_config, open_instance
from remora_llm.backends.vllm.engine import (
    GRAMMARS,
    UNSUPPORTED,
    CacheGauges,
    Library,
    LoopThread,
    VllmEngine,
    resolved,
)
from remora_llm.generation import Generation
from remora_llm.generation.tasks import ModelFacts
from remora_llm.generation.templates import JinjaTemplate
from remora_llm.generation.tokenizing import TokenizerFile
from remora_llm.generation.tool_calls import detect_parser

MODEL_FILE, ADAPTERS_FILE = "model.json", "multi_lora.json"
_PLACES = 64
"""V2 requests that are answered at once; OpenAI's routes have no such limit."""
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_RENAMED = {"disable_log_requests": "enable_log_requests"}
"""Arguments that newer versions of vLLM have under another name, with the opposite value."""
_LIMITED = ("max_sequences", "context_length", "kv_cache_tokens", "prefill_chunk", "step_tokens", "prefix_cache")


class VllmBackend:
    """Backend for repositories of Triton's vLLM backend."""

    name = "vllm"
    preferred_kinds = ("MODEL",)

    def open(self, source: Source, config: ModelConfig) -> VllmModel:
        """Start vLLM with the arguments of ``model.json``.

        Raises:
            NotFoundError: there is no ``model.json``.
            ConfigError: an argument is not known, or vLLM is not installed.
            InternalError: vLLM cannot load the model.
        """
        path = model_path(source, config, MODEL_FILE)
        require_file(path, source, "*.json")
        for key in _LIMITED:
            if key in config.parameters:
                raise ConfigError(f"model '{source.name}': set vLLM's own argument in {MODEL_FILE} instead of '{key}'")
        arguments = read_object(path, source.name)
        return VllmModel(source, parse_settings(config, source.settings), arguments)


class VllmModel:
    """Opened language model."""

    def __init__(self, source: Source, settings: GenerationSettings, arguments: dict[str, Any]) -> None:
        self._source = source
        start_vllm_processes_afresh()
        vllm = import_framework("vllm", source.name, "vLLM", "vllm")
        parameters = importlib.import_module("vllm.sampling_params")
        made = self._engine_arguments(arguments)
        self._gauges = CacheGauges()
        adapters = self._read_adapters()
        thread = LoopThread(source.name)
        try:
            llm, tokenizer = thread.run(self._open(made))
            tokens = self._open_tokens(tokenizer)
            facts = self._facts(vllm, llm, tokenizer, tuple(adapters))
            chat = self._open_template(tokenizer, tokens)
        except BaseException:
            thread.close()
            raise
        library = Library(
            vllm.SamplingParams,
            parameters.RequestOutputKind.DELTA,
            parameters.StructuredOutputsParams,
            _refusals(),
            adapters,
        )
        self._engine = VllmEngine(
            source.name,
            llm,
            library,
            thread,
            facts,
            tokens,
            SystemClock().monotonic_ns,
            self._gauges,
            _cache_tokens(llm),
        )
        self.generation = Generation(
            engine=self._engine,
            tokens=tokens,
            chat=chat,
            default_max_tokens=settings.default_max_tokens,
            served_names=settings.served_names,
            tool_parser=settings.tool_parser or detect_parser(chat.source if chat is not None else ""),
        )

    def _engine_arguments(self, arguments: dict[str, Any]) -> Any:
        """Return ``AsyncEngineArgs``. Raises ConfigError for an unknown argument."""
        engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        known = {each.name for each in dataclasses.fields(engine_args)}
        values = {}
        for name, value in arguments.items():
            key = name if name in known else _RENAMED.get(name, "")
            if key not in known:
                raise ConfigError(
                    f"model '{self._source.name}': {MODEL_FILE} has the argument '{name}', which this version of vLLM "
                    "does not have"
                )
            values[key] = value if key == name else not value
        model = values.get("model")
        if isinstance(model, str) and (self._source.path / model).is_dir():
            values["model"] = str(self._source.path / model)
        try:
            return engine_args(**values)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"model '{self._source.name}': vLLM refuses {MODEL_FILE}: {error}") from error

    async def _open(self, arguments: Any) -> tuple[Any, Any]:
        async_llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        try:
            llm = async_llm.from_engine_args(arguments, stat_loggers=[self._stat_logger])
        except Exception as error:  # vLLM raises what its workers raised
            raise InternalError(
                f"model '{self._source.name}': vLLM cannot load it: {type(error).__name__}: {error}"
            ) from error
        return llm, await resolved(llm.get_tokenizer())

    def _stat_logger(self, config: Any, engine_index: int = 0) -> Any:
        """Return a logger of vLLM's that copies the scheduler's figures."""
        base = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
        gauges = self._gauges

        class Copying(base):  # type: ignore[misc, valid-type]  # a class of an optional dependency
            def __init__(self) -> None:
                """Keep nothing."""

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                """Copy the figures of a step."""
                if scheduler_stats is not None:
                    gauges.usage = scheduler_stats.kv_cache_usage
                    gauges.queries += scheduler_stats.prefix_cache_stats.queries
                    gauges.hits += scheduler_stats.prefix_cache_stats.hits
                if iteration_stats is not None:
                    gauges.preemptions += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None:
                """Do nothing."""

        return Copying()

    def _read_adapters(self) -> dict[str, Any]:
        """Return the LoRA adapters of ``multi_lora.json``, by name."""
        path = self._source.path / ADAPTERS_FILE
        if not path.is_file():
            return {}
        request = importlib.import_module("vllm.lora.request").LoRARequest
        found = {}
        for number, (name, place) in enumerate(read_object(path, self._source.name).items(), 1):
            folder = self._source.path / str(place)
            found[name] = request(name, number, str(folder if folder.is_dir() else place))
        return found

    def _open_tokens(self, tokenizer: Any) -> TokenizerFile:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"model '{self._source.name}': its tokenizer has no tokenizer.json, which remora needs")
        return TokenizerFile(backend.to_str(), self._source.name)

    def _open_template(self, tokenizer: Any, tokens: TokenizerFile) -> JinjaTemplate | None:
        text = getattr(tokenizer, "chat_template", None)
        if not isinstance(text, str) or not text:
            return None
        special = {name: value for name in _SPECIAL if isinstance(value := getattr(tokenizer, name, None), str)}
        return JinjaTemplate(text, tokens, special, self._source.name, SystemClock().monotonic_ns, time.strftime)

    def _facts(self, vllm: Any, llm: Any, tokenizer: Any, adapters: tuple[str, ...]) -> ModelFacts:
        ends = llm.model_config.try_get_generation_config().get("eos_token_id", tokenizer.eos_token_id)
        numbers = ends if isinstance(ends, list) else [ends]
        return ModelFacts(
            context=llm.model_config.max_model_len,
            vocabulary=llm.model_config.get_vocab_size(),
            end_tokens=frozenset(each for each in numbers if isinstance(each, int)),
            max_logprobs=max(getattr(llm.model_config, "max_logprobs", 20), 0),
            grammars=frozenset(GRAMMARS),
            unsupported=UNSUPPORTED,
            fingerprint=f"vllm-{vllm.__version__}",
            adapters=adapters,
            max_adapters=getattr(getattr(llm, "lora_config", None), "max_loras", 0) or len(adapters),
        )

    def complete(self, config: ModelConfig) -> None:
        """Complete a configuration; see `complete_config`."""
        complete_config(config, _PLACES // 2)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return a place for one V2 request."""
        return open_instance(placement, config, self.generation, lambda: self._engine.trouble)

    def close(self) -> None:
        """End all tasks and shut vLLM down."""
        self._engine.close()


def _refusals() -> tuple[type[Exception], ...]:
    """Return the classes of the errors by which vLLM refuses a request."""
    try:
        found = importlib.import_module("vllm.exceptions").VLLMValidationError
    except (ImportError, AttributeError):  # versions before it had this class
        return (ValueError,)
    return (ValueError, found)


def _cache_tokens(llm: Any) -> int:
    """Return the number of tokens that vLLM's cache holds, 0 if it does not tell."""
    cache = llm.vllm_config.cache_config
    return int((cache.num_gpu_blocks or 0) * (cache.block_size or 0))


__all__ = ["VllmBackend", "VllmModel"]
