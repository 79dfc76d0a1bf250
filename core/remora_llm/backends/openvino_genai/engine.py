"""Engine over OpenVINO GenAI's continuous batching, which schedules by itself.

One thread runs the library's steps and reads what they wrote. OpenVINO GenAI keeps Python's lock during a step, so that
other threads of the process run between the steps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from remora.errors import InternalError
from remora_llm.generation import EngineStats, Sink, Tokens
from remora_llm.generation.library_answers import LibraryAnswer, LibraryAnswers
from remora_llm.generation.task_book import EngineThread, trouble_after
from remora_llm.generation.tasks import ModelFacts, Task, TokenLogprob, check_task

_log = logging.getLogger("remora.generation")

UNSUPPORTED = frozenset({"logit_bias", "prompt_logprobs", "grammar", "priority", "reuse"})
"""Attributes of tasks that the library has no counterpart of.

It has grammars, but one that it cannot compile makes every further step raise.
"""


class Library(NamedTuple):
    """Modules and objects of the library.

    ``open_pipeline`` returns a new ``ContinuousBatchingPipeline``.
    """

    genai: Any
    tensor: Callable[[Any], Any]
    open_pipeline: Callable[[], Any]


class OpenVinoEngine:
    """`TokenEngine` over a ``ContinuousBatchingPipeline``.

    Args:
        name: of the model.
        library: see `Library`.
        facts: of the model.
        tokens: its tokenizer.
        now_ns: monotonic clock, the one of the tasks' deadlines.
        capacity: number of tokens that the cache holds; 0 if it grows.
    """

    def __init__(
        self,
        name: str,
        library: Library,
        facts: ModelFacts,
        tokens: Tokens,
        now_ns: Callable[[], int],
        capacity: int,
    ) -> None:
        self.facts = facts
        self.trouble = ""
        """Why the engine cannot run tasks, empty if it can."""
        self._name = name
        self._library = library
        self._pipeline = library.open_pipeline()
        self._now = now_ns
        self._capacity = capacity
        self._thread = EngineThread(name, self._run)
        self._answers: LibraryAnswers[None] = LibraryAnswers(
            name, facts, tokens, now_ns, trouble=lambda: self.trouble, wake=self._thread.start
        )
        self.measurements = self._answers.book.measurements
        self._handles: dict[int, Any] = {}
        self._cache_share = 0.0

    # -- Any thread ----------------------------------------------------------------------------------------------------

    def begin(self, task: Task, sink: Sink) -> None:
        """Queue a task; see `remora_llm.generation.TokenEngine`."""
        check_task(task, self.facts)
        self._answers.book.enter(task, sink, self._now(), None)

    def cancel(self, task: Task) -> None:
        """End a task early; see `remora_llm.generation.TokenEngine`."""
        self._answers.book.cancel(task)

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        used = round(self._cache_share * self._capacity)
        return replace(self._answers.stats(), cache_tokens=used, cache_capacity=self._capacity)

    def close(self) -> None:
        """End all tasks with UnavailableError and release the library's objects."""
        self._answers.book.close()
        self._thread.join()
        self._pipeline = None

    # -- The engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._answers.book.wait(lambda: not self._handles):
            try:
                self._turn()
            except Exception as error:  # of the library, in which any request may be the cause
                self._failed(error)
            self._answers.book.deliver()
        self._handles.clear()
        self._answers.unload()

    def _turn(self) -> None:
        opened, stopped = self._answers.take()
        for answer, _ in opened:
            self._submit(answer)
        for answer in stopped:
            self._stop(answer)
        for answer in self._answers.end_late():
            self._stop(answer)
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            self._cache_share = self._pipeline.get_metrics().cache_usage / 100
        for answer in self._answers.open:
            self._read(answer)

    def _submit(self, answer: LibraryAnswer) -> None:
        task, number = answer.task, answer.number
        prompt = self._library.tensor(np.asarray([task.prompt], np.int64))
        try:
            config = generation_config(self._library.genai, task, answer.choice, self.facts)
            self._handles[number] = self._pipeline.add_request(number, prompt, config)
        except Exception as error:  # of this request
            message = f"model '{self._name}' refused the request: {type(error).__name__}: {error}"
            self._answers.end(answer, "error", InternalError(message, from_model=True))

    def _read(self, answer: LibraryAnswer) -> None:
        """Take what the last step wrote for an answer."""
        handle = self._handles[answer.number]
        while handle.can_read():
            for output in handle.read().values():
                tokens = list(output.generated_ids)
                scores = _scores(answer.task, tokens, output.generated_log_probs)
                if self._answers.write(answer, tokens, scores):
                    self._stop(answer)
                    return
        status = handle.get_status()
        if status == self._library.genai.GenerationStatus.RUNNING:
            return
        self._stop(answer)
        if status == self._library.genai.GenerationStatus.IGNORED:
            message = f"model '{self._name}': the request does not fit into the cache: raise kv_cache_tokens"
            self._answers.end(answer, "error", InternalError(message, from_model=True))
        else:
            self._answers.end(answer, "length" if answer.count >= answer.task.max_tokens else "stop")

    def _stop(self, answer: LibraryAnswer) -> None:
        handle = self._handles.pop(answer.number, None)
        if handle is not None and handle.get_status() == self._library.genai.GenerationStatus.RUNNING:
            handle.cancel()

    def _failed(self, error: Exception) -> None:
        """End all answers, and open the pipeline again because it repeats an error with every step."""
        _log.error("model '%s' failed in a step: %s", self._name, error, exc_info=error)
        self._handles.clear()
        self._answers.end_all(self._answers.book.failure(error))
        try:
            self._pipeline = None
            self._pipeline = self._library.open_pipeline()
        except Exception as again:
            self.trouble = trouble_after(error, again)
            _log.exception("model '%s' cannot be opened again", self._name)


def generation_config(genai: Any, task: Task, choice: int, facts: ModelFacts) -> Any:
    """Return the library's parameters for one choice of a task."""
    sampling = task.sampling
    config = genai.GenerationConfig()
    config.apply_chat_template = False
    config.max_new_tokens = task.max_tokens
    config.min_new_tokens = task.min_tokens
    config.ignore_eos = True  # the end tokens are among the stop tokens, unless the task ignores them
    config.stop_token_ids = set(task.stop_tokens if task.ignore_end else task.stop_tokens | facts.end_tokens)
    config.repetition_penalty = sampling.repetition_penalty
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.logprobs = 0 if task.logprobs is None else 1
    if sampling.temperature:
        config.do_sample = True
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
        config.rng_seed = seed_of(sampling.seed, choice)
    return config


def seed_of(seed: int, choice: int) -> int:
    """Return the library's seed for one choice, below 2^32 and different from the others'."""
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _scores(task: Task, tokens: Sequence[int], logprobs: Sequence[float]) -> list[TokenLogprob]:
    """Return log probabilities for the tokens, if the task requests them."""
    if task.logprobs is None:
        return []
    rank = 1 if not task.sampling.temperature else 0
    return [TokenLogprob(token, min(value, 0.0), rank) for token, value in zip(tokens, logprobs, strict=False)]
