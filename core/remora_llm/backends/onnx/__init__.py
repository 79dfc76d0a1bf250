"""Backend for language models in folders with ``genai_config.json``, on ONNX Runtime.

The folder is what onnxruntime-genai's exporter writes. remora schedules the steps itself, so that requests join and
leave a running batch; onnxruntime-genai is not needed. ONNX Runtime and the tokenizer are imported when the first model
is opened.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from typing import Any

from remora.api.backends import (
    CPU_PROVIDER,
    CUDA,
    CUDA_PROVIDER,
    HOST,
    SessionPlan,
    free_gpu_bytes,
    health_of,
    import_onnxruntime,
    memory_of,
    open_session,
    require_cuda,
    usable_providers,
)
from remora.api.system import memory_bytes, memory_in_use_bytes, memory_limit_bytes
from remora.backends import Instance, Placement, Source
from remora.backends.model_files import require_file
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from remora.system.clock import SystemClock
from remora_llm.backends.onnx.folder import (
    CONFIG_FILENAME,
    DecoderFolder,
    read_file,
    read_folder,
    special_tokens,
)
from remora_llm.backends.onnx.onnx_stepper import CacheSize, OnnxStepper, cache_type, token_bytes
from remora_llm.backends.onnx.settings import GenerationSettings, parse_settings
from remora_llm.backends.onnx.tensors import complete_config, open_instance
from remora_llm.generation import Generation, Stepper
from remora_llm.generation.grammar import KINDS, GrammarCompiler
from remora_llm.generation.step_loop import LoopSettings, StepLoop
from remora_llm.generation.tasks import ModelFacts
from remora_llm.generation.templates import JinjaTemplate
from remora_llm.generation.tokenizing import TokenizerFile, read_tokenizer
from remora_llm.generation.tool_calls import detect_parser

_log = logging.getLogger(__name__)

_SPARE_ROWS = 4
"""Rows beside those of running requests, for prompts that may be reused."""
_MEMORY_SHARE = 0.7
"""Largest part of the free memory that the cache takes without a configured context."""
_LEAST_CONTEXT = 64


class GenerationBackend:
    """Backend for folders with ``genai_config.json``."""

    name = "generation"

    def open(self, source: Source, config: ModelConfig) -> GenerationModel:
        """Load the model, its tokenizer and its chat template.

        Raises:
            NotFoundError: there is no ``genai_config.json``.
            ConfigError: a file or parameter is wrong, or the cache does not fit into memory.
            InternalError: ONNX Runtime cannot load the graph.
        """
        _refuse_without_export(source)
        require_file(source.path / CONFIG_FILENAME, source, "*.json")
        settings = parse_settings(config, source.settings)
        folder = read_folder(source.path, source.name)
        return GenerationModel(source, config, settings, folder)


class GenerationModel:
    """Opened language model."""

    def __init__(
        self, source: Source, config: ModelConfig, settings: GenerationSettings, folder: DecoderFolder
    ) -> None:
        self._source = source
        self._settings = settings
        self._folder = folder
        self._threads_configured = bool(config.instance_group)
        self._on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
        self._gpu = next((gpu for group in config.instance_group for gpu in group.gpus), 0)
        require_file(source.path / "tokenizer.json", source, "tokenizer*")
        tokens = read_tokenizer(source.path / "tokenizer.json", source.name)
        self._facts = self._make_facts(tokens.vocabulary)
        chat = self._open_template(tokens)
        self._session: Any = self._open_session()
        stepper = self._open_stepper()
        loop_settings = LoopSettings(
            source.name,
            sequences=settings.max_sequences,
            cache_tokens=min(settings.kv_cache_tokens or stepper.rows * stepper.length, stepper.rows * stepper.length),
            prefill_chunk=settings.prefill_chunk,
            step_tokens=settings.step_tokens,
            prefix_cache=settings.prefix_cache,
        )
        content = (source.path / "tokenizer.json").read_text(encoding="utf-8")
        compiler = GrammarCompiler(content, folder.vocabulary, folder.end_tokens)
        loop = StepLoop(
            stepper,
            tokens,
            loop_settings,
            SystemClock().monotonic_ns,
            compile_grammar=compiler.compile,
            reopen=self._reopen,
            lost=health_of(self._gpu).probed if self._on_gpu else None,
        )
        self._loop = loop
        self.generation = Generation(
            engine=loop,
            tokens=tokens,
            chat=chat,
            defaults=folder.defaults,
            default_max_tokens=settings.default_max_tokens,
            served_names=settings.served_names,
            tool_parser=settings.tool_parser or detect_parser(chat.source if chat is not None else ""),
        )

    @property
    def preferred_kinds(self) -> tuple[str, ...]:
        """Kinds that KIND_AUTO resolves to: a GPU only where the configuration asks for it."""
        return ("GPU", "CPU") if self._on_gpu else ("CPU",)

    def _make_facts(self, tokenizer_vocabulary: int) -> ModelFacts:
        folder = self._folder
        if tokenizer_vocabulary > folder.vocabulary:
            raise ConfigError(
                f"model '{self._source.name}': its tokenizer has {tokenizer_vocabulary} tokens, its logits only "
                f"{folder.vocabulary}: the files belong to different models"
            )
        context = self._settings.context_length or folder.context
        if context > folder.context:
            raise ConfigError(
                f"model '{self._source.name}': parameter context_length is {context}, the model has {folder.context}"
            )
        return ModelFacts(
            context=context,
            vocabulary=folder.vocabulary,
            end_tokens=folder.end_tokens,
            grammars=KINDS,
            batch_invariant=not self._on_gpu,
            fingerprint=self._fingerprint(),
        )

    def _open_template(self, tokens: TokenizerFile) -> JinjaTemplate | None:
        """Return the chat template, None if the model has none. Raises ConfigError."""
        source, text = self._source, self._folder.template
        if self._settings.chat_template:
            text = read_file(source.path, self._settings.chat_template, source.name)
        if not text:
            return None
        special = special_tokens(source.path, source.name)
        return JinjaTemplate(text, tokens, special, source.name, SystemClock().monotonic_ns, time.strftime)

    def _fingerprint(self) -> str:
        """Return a digest of the folder: its small files, and the sizes of all."""
        digest = hashlib.blake2b(digest_size=8)
        for path in sorted(self._source.path.iterdir()):
            if path.is_file():
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for small in (CONFIG_FILENAME, "tokenizer.json"):
            digest.update((self._source.path / small).read_bytes())
        return f"remora-onnx-{digest.hexdigest()}"

    def _open_session(self) -> Any:
        runtime = import_onnxruntime(self._source.name)
        plan = SessionPlan(
            self._settings.intra_op_threads or self._source.cpus,
            # threads that spin between the steps would take the processor from the front ends
            entries={"session.force_spinning_stop": "1"},
        )
        chain: list[tuple[str, dict[str, str]]] = [(CPU_PROVIDER, {})]
        if self._on_gpu:
            require_cuda(runtime, self._source.name, usable_providers(runtime, on_gpu=True))
            chain.insert(0, (CUDA_PROVIDER, {"device_id": str(self._gpu)}))
        return open_session(runtime, self._source, self._folder.path, plan, chain)

    def _open_stepper(self) -> Stepper:
        """Return a stepper whose cache fits into memory. Raises ConfigError."""
        folder, settings, name = self._folder, self._settings, self._source.name
        dtype = cache_type(self._session, folder, name)
        rows = settings.max_sequences + (_SPARE_ROWS if settings.prefix_cache else 1)
        size = CacheSize(rows, self._facts.context)
        free = free_gpu_bytes(self._gpu) if self._on_gpu else _free_bytes()
        needed = size.nbytes(folder, dtype.itemsize)
        if free is not None and needed > free * _MEMORY_SHARE:
            fits = int(free * _MEMORY_SHARE) // (rows * token_bytes(folder, dtype.itemsize))
            if settings.context_length or fits < _LEAST_CONTEXT:
                where = f" of GPU {self._gpu}" if self._on_gpu else ""
                raise ConfigError(
                    f"model '{name}': its cache of {rows} rows of {size.length} tokens takes {needed >> 20} MiB, "
                    f"{free >> 20} MiB{where} are free, of which it may take {_MEMORY_SHARE:.0%}: reduce max_sequences "
                    "or context_length"
                )
            _log.warning(
                "model '%s': context reduced from %d to %d tokens, because its cache would take %d MiB",
                name,
                size.length,
                fits,
                needed >> 20,
            )
            size = CacheSize(rows, fits)
            self._facts = replace(self._facts, context=fits)
        memory = memory_of((CUDA, self._gpu) if self._on_gpu else HOST)
        return OnnxStepper(self._session, folder, size, settings.prefill_chunk + 1, self._facts, memory, dtype)

    def _reopen(self) -> Stepper:
        self._session = None  # its memory is needed for the new one
        self._session = self._open_session()
        return self._open_stepper()

    def complete(self, config: ModelConfig) -> None:
        """Complete a configuration; see `complete_config`."""
        complete_config(config, 0 if self._threads_configured else self._settings.max_sequences)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return a place for one V2 request."""
        health = health_of(self._gpu) if self._on_gpu else None
        return open_instance(placement, config, self.generation, lambda: self._loop.trouble, health)

    def close(self) -> None:
        """End all tasks and release the model."""
        self._loop.close()
        self._session = None


def _refuse_without_export(source: Source) -> None:
    """Raise ConfigError with the command that exports a folder of Hugging Face."""
    folder = source.path
    if (folder / CONFIG_FILENAME).exists() or not (folder / "config.json").is_file():
        return
    raise ConfigError(
        f"model '{source.name}': its folder has a Hugging Face model's weights and no {CONFIG_FILENAME}. Export it: "
        f"remora export-llm {folder} --output REPOSITORY/NAME; or serve it as it is on vLLM "
        '(backend: "vllm" with a model.json)'
    )


def _free_bytes() -> int:
    """Return the memory that the process may still take."""
    limit = memory_limit_bytes()
    _, available = memory_bytes()
    return available if limit is None else max(min(available, limit - memory_in_use_bytes()), 0)


__all__ = ["GenerationBackend", "GenerationModel"]
