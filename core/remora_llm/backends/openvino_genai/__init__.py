"""Backend for language models on OpenVINO GenAI: exported folders and GGUF files.

The library schedules, samples and keeps the cache by itself; see `remora_llm.backends.openvino_genai.engine`. It is
imported when the first model is opened.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import mmap
import time
from pathlib import Path
from typing import Any

from remora.backends import Instance, Placement, Source
from remora.backends.model_files import import_framework, load_failure, model_path, require_file
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.clock import SystemClock
from remora_llm.backends.onnx.folder import read_file, read_object, special_tokens, template_of
from remora_llm.backends.onnx.settings import GenerationSettings, parse_settings
from remora_llm.backends.onnx.tensors import complete_config, open_instance
from remora_llm.backends.openvino_genai.engine import UNSUPPORTED, Library, OpenVinoEngine
from remora_llm.backends.openvino_genai.gguf import CONTROL_TOKEN, GgufError, read_metadata
from remora_llm.backends.openvino_genai.vocabulary import VocabularyTokens
from remora_llm.generation import Generation
from remora_llm.generation.tasks import ModelFacts
from remora_llm.generation.templates import JinjaTemplate
from remora_llm.generation.tokenizing import TokenizerFile, read_tokenizer
from remora_llm.generation.tool_calls import detect_parser

_log = logging.getLogger(__name__)

MODEL_FILE, GGUF_FILE = "openvino_model.xml", "model.gguf"
_BLOCK_TOKENS = 32
"""Tokens of a block of the library's cache on CPUs."""
_ONLY_OTHER = ("prefill_chunk",)


class OpenVinoGenAiBackend:
    """Backend for folders with ``openvino_model.xml``, and for ``.gguf`` files."""

    name = "openvino_genai"
    preferred_kinds = ("CPU",)

    def open(self, source: Source, config: ModelConfig) -> OpenVinoGenAiModel:
        """Load the model, its tokenizer and its chat template.

        Raises:
            NotFoundError: there is no model file.
            ConfigError: a file or parameter is wrong, or OpenVINO GenAI is not installed.
            InternalError: OpenVINO GenAI cannot load the model.
        """
        path = model_path(source, config, MODEL_FILE)
        if not path.exists() and not config.default_model_filename:
            beside = path.with_name(GGUF_FILE)
            path = beside if beside.is_file() else path
        require_file(path, source, "*.xml", "*.gguf")
        for key in _ONLY_OTHER:
            if key in config.parameters:
                raise ConfigError(f"model '{source.name}': OpenVINO GenAI has no parameter '{key}': remove it")
        settings = parse_settings(config, source.settings)
        return OpenVinoGenAiModel(source, settings, path, places_configured=bool(config.instance_group))


class OpenVinoGenAiModel:
    """Opened language model."""

    def __init__(
        self, source: Source, settings: GenerationSettings, path: Path, *, places_configured: bool = False
    ) -> None:
        self._source = source
        self._places_configured = places_configured
        self._settings = settings
        self._path = path
        self._genai = import_framework("openvino_genai", source.name, "OpenVINO GenAI", "openvino-genai")
        described = _describe_gguf(path, source.name) if path.suffix == ".gguf" else _describe_folder(path, source.name)
        target = path if path.suffix == ".gguf" else path.parent
        try:
            pipeline = self._open_pipeline(target)
            tokens = self._open_tokens(pipeline, described)
        except ConfigError:
            raise
        except Exception as error:  # the library raises RuntimeError for whatever is wrong with files
            raise load_failure(source, path, error) from error
        context = settings.context_length or described.context
        if described.context and context > described.context:
            raise ConfigError(
                f"model '{source.name}': parameter context_length is {context}, the model has {described.context}"
            )
        facts = ModelFacts(
            context=context,
            vocabulary=tokens.vocabulary,
            end_tokens=described.end_tokens or _end_token(pipeline),
            max_logprobs=0,
            unsupported=UNSUPPORTED,
            fingerprint=_fingerprint(path),
        )
        chat = self._open_template(pipeline, tokens, described)
        pipelines = [pipeline]
        tensor = importlib.import_module("openvino").Tensor
        capacity = settings.kv_cache_tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
        engine = OpenVinoEngine(
            source.name,
            Library(self._genai, tensor, lambda: pipelines.pop() if pipelines else self._open_pipeline(target)),
            facts,
            tokens,
            SystemClock().monotonic_ns,
            capacity or settings.max_sequences * context,
        )
        self._engine = engine
        self.generation = Generation(
            engine=engine,
            tokens=tokens,
            chat=chat,
            default_max_tokens=settings.default_max_tokens,
            served_names=settings.served_names,
            tool_parser=settings.tool_parser or detect_parser(chat.source if chat is not None else ""),
        )

    def _open_pipeline(self, target: Path) -> Any:
        genai, settings = self._genai, self._settings
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = settings.max_sequences
        scheduler.max_num_batched_tokens = settings.step_tokens
        scheduler.enable_prefix_caching = settings.prefix_cache
        scheduler.dynamic_split_fuse = True
        if settings.kv_cache_tokens:
            scheduler.num_kv_blocks = max(settings.kv_cache_tokens // _BLOCK_TOKENS, 1)
        threads = settings.intra_op_threads or self._source.cpus
        return genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def _open_tokens(self, pipeline: Any, described: _Described) -> TokenizerFile | VocabularyTokens:
        """Return the folder's own tokenizer if remora can read it, or else OpenVINO's."""
        beside = self._path.with_name("tokenizer.json")
        if beside.is_file():
            return read_tokenizer(beside, self._source.name)
        tokenizer = pipeline.get_tokenizer()
        names = {number: name for name, number in tokenizer.get_vocab().items()}
        special = {each: names[each].decode("utf-8", "replace") for each in described.special if each in names}
        return VocabularyTokens(tokenizer, special)

    def _open_template(
        self, pipeline: Any, tokens: TokenizerFile | VocabularyTokens, described: _Described
    ) -> JinjaTemplate | None:
        source, text = self._source, described.template
        if self._settings.chat_template:
            text = read_file(self._path.parent, self._settings.chat_template, source.name)
        text = text or pipeline.get_tokenizer().get_original_chat_template()
        if not text:
            return None
        special = special_tokens(self._path.parent, source.name)
        return JinjaTemplate(text, tokens, special, source.name, SystemClock().monotonic_ns, time.strftime)

    def complete(self, config: ModelConfig) -> None:
        """Complete a configuration; see `complete_config`."""
        complete_config(config, 0 if self._places_configured else self._settings.max_sequences)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return a place for one V2 request."""
        return open_instance(placement, config, self.generation, lambda: self._engine.trouble)

    def close(self) -> None:
        """End all tasks and release the model."""
        self._engine.close()


class _Described:
    """What a model's files say about it. ``context`` is 0 if they do not say it."""

    def __init__(
        self, context: int, end_tokens: frozenset[int] = frozenset(), special: tuple[int, ...] = (), template: str = ""
    ) -> None:
        self.context = context
        self.end_tokens = end_tokens
        self.special = special
        self.template = template


def _describe_folder(path: Path, name: str) -> _Described:
    """Return what a folder's JSON files say. Raises ConfigError."""
    config = read_object(path.with_name("config.json"), name)
    more = path.with_name("generation_config.json")
    ends = (read_object(more, name) if more.is_file() else {}).get("eos_token_id", config.get("eos_token_id", []))
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"model '{name}': config.json has no max_position_embeddings: set context_length")
    numbers = ends if isinstance(ends, list) else [ends]
    return _Described(
        context, frozenset(each for each in numbers if isinstance(each, int)), template=template_of(path.parent, name)
    )


def _describe_gguf(path: Path, name: str) -> _Described:
    """Return what a GGUF file's header says. Raises ConfigError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = memoryview(content)
            try:
                found = read_metadata(view)
            finally:
                view.release()
    except (OSError, ValueError) as error:
        what = "is not a GGUF file" if isinstance(error, GgufError) else "cannot be read"
        raise ConfigError(f"model '{name}': {path.name} {what}: {error}") from error
    context = found.get(f"{found.get('general.architecture')}.context_length")
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"model '{name}': {path.name} has no context_length in its metadata")
    kinds = found.get("tokenizer.ggml.token_type")
    special = (
        tuple(place for place, kind in enumerate(kinds) if kind == CONTROL_TOKEN) if isinstance(kinds, list) else ()
    )
    end = found.get("tokenizer.ggml.eos_token_id")
    template = found.get("tokenizer.chat_template", "")
    return _Described(
        context,
        frozenset({end}) if isinstance(end, int) else frozenset(),
        special,
        template if isinstance(template, str) else "",
    )


def _end_token(pipeline: Any) -> frozenset[int]:
    number = pipeline.get_tokenizer().get_eos_token_id()
    return frozenset({number}) if number >= 0 else frozenset()


def _fingerprint(path: Path) -> str:
    """Return a digest of the names and sizes of the model's files."""
    files = [path] if path.suffix == ".gguf" else sorted(path.parent.iterdir())
    digest = hashlib.blake2b(digest_size=8)
    for each in files:
        if each.is_file():
            digest.update(f"{each.name} {each.stat().st_size}\n".encode())
    return f"remora-openvino-{digest.hexdigest()}"


__all__ = ["OpenVinoGenAiBackend", "OpenVinoGenAiModel"]
