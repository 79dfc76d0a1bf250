"""Engine over vLLM's ``AsyncLLM``, which schedules by itself, in a thread with a loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from remora.api.system import start_daemon
from remora.errors import InternalError, InvalidArgumentError
from remora_llm.generation import EngineStats, Sink, Tokens
from remora_llm.generation.grammar_limits import GRAMMAR_STACK_BYTES
from remora_llm.generation.library_answers import LibraryAnswer, LibraryAnswers
from remora_llm.generation.tasks import Grammar, ModelFacts, ParameterError, Task, TokenLogprob, check_task

_log = logging.getLogger("remora.generation")

UNSUPPORTED = frozenset({"prompt_logprobs", "priority", "reuse"})
"""Attributes of tasks that are not passed on."""
GRAMMARS: Mapping[str, str] = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "lark": "grammar",
}
"""Kinds of grammars and vLLM's names of them."""


class Library(NamedTuple):
    """Classes of vLLM.

    ``refusals`` are the errors of a request that vLLM refuses. ``adapters`` has the requests for LoRA adapters by name.
    """

    sampling_params: Callable[..., Any]
    delta: Any
    structured_outputs: Callable[..., Any]
    refusals: tuple[type[Exception], ...] = (ValueError,)
    adapters: Mapping[str, Any] = {}


@dataclass(slots=True)
class CacheGauges:
    """Figures of vLLM's scheduler that `VllmEngine` reports; vLLM's loop writes them."""

    usage: float = 0.0
    running: int = 0
    waiting: int = 0
    queries: int = 0
    hits: int = 0
    preemptions: int = 0


class LoopThread:
    """Thread with an event loop, in which vLLM's coroutines run.

    Args:
        name: of the model.
        end_s: longest time that cancelled tasks have to end, in seconds.
    """

    def __init__(self, name: str, end_s: float = 10.0) -> None:
        self._name = name
        self._end_s = end_s
        self.loop = asyncio.new_event_loop()
        # vLLM compiles grammars in the loop
        self._thread = start_daemon(self.loop.run_forever, f"remora {name} vllm", stack_bytes=GRAMMAR_STACK_BYTES)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end and return its result, or raise its error.

        Not for the loop's thread.
        """
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Cancel the tasks of the loop, stop it and join the thread."""
        self.run(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_tasks(self) -> None:
        """End vLLM's own tasks, which its shutdown cancels without waiting for them."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await self.wait_for(tasks)

    async def wait_for(self, tasks: Collection[asyncio.Future[None]]) -> None:
        """Wait for cancelled tasks, which may be vLLM's own; log those that do not end in time."""
        ended = asyncio.gather(*tasks, return_exceptions=True)  # takes their errors, which asyncio would log
        await asyncio.wait([ended], timeout=self._end_s)
        for task in tasks:
            if not task.done():
                _log.warning("model '%s': a task of vLLM did not end within %g s: %r", self._name, self._end_s, task)


class VllmEngine:
    """`TokenEngine` over an ``AsyncLLM``.

    Args:
        name: of the model.
        llm: the ``AsyncLLM``, opened in the loop of ``thread``.
        library: see `Library`.
        thread: closed by this object.
        facts: of the model.
        tokens: its tokenizer.
        now_ns: monotonic clock, the one of the tasks' deadlines.
        gauges: figures of the scheduler.
        capacity: number of tokens that the cache holds.
    """

    def __init__(
        self,
        name: str,
        llm: Any,
        library: Library,
        thread: LoopThread,
        facts: ModelFacts,
        tokens: Tokens,
        now_ns: Callable[[], int],
        gauges: CacheGauges,
        capacity: int,
    ) -> None:
        self.facts = facts
        self._name = name
        self._llm = llm
        self._library = library
        self._thread = thread
        self._now = now_ns
        self._gauges = gauges
        self._capacity = capacity
        self._answers: LibraryAnswers[Sequence[Any]] = LibraryAnswers(
            name, facts, tokens, now_ns, trouble=lambda: self.trouble, wake=self._wake
        )
        self.measurements = self._answers.book.measurements
        self._work: dict[int, asyncio.Task[None]] = {}
        self._posted = False

    @property
    def trouble(self) -> str:
        """Why the engine cannot run tasks, empty if it can."""
        return f"vLLM's engine has failed ({self._llm.dead_error}); reload it" if self._llm.errored else ""

    # -- Any thread ----------------------------------------------------------------------------------------------------

    def begin(self, task: Task, sink: Sink) -> None:
        """Queue a task; see `remora_llm.generation.TokenEngine`."""
        check_task(task, self.facts)
        try:
            parameters = [sampling_parameters(self._library, task, choice) for choice in range(task.choices)]
        except self._library.refusals as error:
            raise ParameterError("sampling_parameters", f"vLLM refuses the parameters: {error}") from error
        self._answers.book.enter(task, sink, self._now(), parameters)

    def cancel(self, task: Task) -> None:
        """End a task early; see `remora_llm.generation.TokenEngine`."""
        self._answers.book.cancel(task)

    def _wake(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._take_notes)

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        gauges = self._gauges
        return replace(
            self._answers.stats(),
            cache_tokens=round(gauges.usage * self._capacity),
            cache_capacity=self._capacity,
            prefix_queries=gauges.queries,
            prefix_hits=gauges.hits,
            preemptions=gauges.preemptions,
        )

    def close(self) -> None:
        """End all tasks with UnavailableError and shut vLLM down."""
        self._answers.book.close()
        try:
            self._thread.run(self._end_all())
        finally:
            try:
                self._llm.shutdown()
            finally:
                self._thread.close()

    # -- The loop's thread ---------------------------------------------------------------------------------------------

    def _take_notes(self) -> None:
        opened, stopped = self._answers.take()
        for answer, parameters in opened:
            self._work[answer.number] = self._thread.loop.create_task(self._generate(answer, parameters[answer.choice]))
            if answer.task.deadline_ns and not answer.choice:
                self._thread.loop.call_later(max(answer.task.deadline_ns - self._now(), 0) / 1e9, self._end_late)
        for answer in stopped:
            self._stop(answer)
        self._deliver_soon()

    async def _generate(self, answer: LibraryAnswer, parameters: Any) -> None:
        """Pass the tokens of one choice on, until it ends."""
        key = f"{answer.task.id or 'task'}-{answer.number}"
        more = {"lora_request": self._library.adapters[answer.task.adapter]} if answer.task.adapter else {}
        prompt: dict[str, object] = {"prompt_token_ids": list(answer.task.prompt)}
        if answer.task.caller:  # prompts are reused for the same caller alone
            prompt["cache_salt"] = answer.task.caller
        outputs = self._llm.generate(prompt, parameters, key, **more)
        try:
            async for output in outputs:
                answer.cached = output.num_cached_tokens or 0
                made = output.outputs[0]
                done = self._answers.write(answer, tuple(made.token_ids), _scores(answer.task, made))
                if not done and made.finish_reason is not None:
                    self._answers.end(answer, "length" if made.finish_reason == "length" else "stop")
                self._deliver_soon()
                if done:
                    break
        except self._library.refusals as error:
            self._answers.end(answer, "error", InvalidArgumentError(f"vLLM refuses the request: {error}"))
        except asyncio.CancelledError:
            pass
        except Exception as error:
            _log.error("model '%s': a request failed: %s", self._name, error, exc_info=error)
            self._answers.end(answer, "error", self._answers.book.failure(error, "failed"))
        finally:
            self._work.pop(answer.number, None)
            await self._llm.abort(key)  # has no effect on a request that has ended
            self._answers.end(answer, "error", InternalError(f"model '{self._name}' gave no end", from_model=True))
            self._deliver_soon()

    def _end_late(self) -> None:
        for answer in self._answers.end_late():
            self._stop(answer)
        self._deliver_soon()

    def _stop(self, answer: LibraryAnswer) -> None:
        work = self._work.get(answer.number)
        if work is not None:
            work.cancel()

    def _deliver_soon(self) -> None:
        """Deliver once for all requests of this turn of the loop."""
        if not self._posted:
            self._posted = True
            self._thread.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._posted = False
        self._answers.book.deliver()

    async def _end_all(self) -> None:
        work: list[asyncio.Future[None]] = list(self._work.values())
        for answer in self._answers.open:
            self._stop(answer)
        self._answers.unload()
        reader = getattr(self._llm, "output_handler", None)  # vLLM starts it with the first request
        if reader is not None:
            reader.cancel()  # because it would log the end of vLLM's processes as a failure
            work.append(reader)
        await self._thread.wait_for(work)


def sampling_parameters(library: Library, task: Task, choice: int) -> Any:
    """Return vLLM's parameters for one choice of a task.

    Raises one of the library's refusals.
    """
    sampling = task.sampling
    return library.sampling_params(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=(sampling.seed + choice) % (1 << 63),
        stop_token_ids=sorted(task.stop_tokens),
        ignore_eos=task.ignore_end,
        max_tokens=task.max_tokens,
        min_tokens=task.min_tokens,
        logprobs=task.logprobs,
        structured_outputs=_structured(library, task.grammar),
        detokenize=False,
        output_kind=library.delta,
    )


def _structured(library: Library, grammar: Grammar | None) -> Any:
    if grammar is None:
        return None
    if grammar.kind == "json_object":
        return library.structured_outputs(json_object=True)
    if grammar.kind == "choice":
        return library.structured_outputs(choice=json.loads(grammar.text))
    return library.structured_outputs(**{GRAMMARS[grammar.kind]: grammar.text})


def _scores(task: Task, made: Any) -> list[TokenLogprob]:
    """Return the log probabilities of an output's tokens, if the task requests them."""
    if task.logprobs is None or made.logprobs is None:
        return []
    found = []
    for token, row in zip(made.token_ids, made.logprobs, strict=True):
        top = sorted((each.rank, number, each.logprob) for number, each in row.items() if each.rank <= task.logprobs)
        own = row[token]
        pairs = tuple((number, logprob) for _, number, logprob in top)
        found.append(TokenLogprob(token, own.logprob, own.rank, pairs))
    return found


async def resolved(value: Awaitable[Any] | Any) -> Any:
    """Return a value, or the result of one that must be awaited."""
    return await value if inspect.isawaitable(value) else value
