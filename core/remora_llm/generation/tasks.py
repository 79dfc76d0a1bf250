"""Tasks, answers and properties of a language model, as plain data.

Invariant: a task determines its tokens. Two tasks with equal prompt, sampling and limits get the same tokens from an
engine whose facts are ``batch_invariant``, whatever runs beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from remora.errors import InvalidArgumentError, RemoraError
from remora_llm.generation.grammar_limits import grammar_excess

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
EndReason = Literal["stop", "length", "deadline", "cancelled", "error"]

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1 << 12
MAX_CHOICES = 128
MAX_BIASES = 1 << 10
LEAST_TEMPERATURE = 1e-5
"""Least temperature whose quotients with logits are numbers."""
_SEED_LIMIT = 1 << 64


class ParameterError(InvalidArgumentError):
    """A parameter of a task that the model cannot honour.

    Args:
        parameter: its name as in OpenAI's API, for the error's ``param``.
        message: value, limit and remedy in one line.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class ContextError(ParameterError):
    """A prompt and an answer that do not fit into the limit of tokens.

    Args:
        parameter, message: as of `ParameterError`.
        limit: number of tokens that are possible.
        prompt: tokens of the prompt, or the least number that it can have if it was not read to its end.
        answer: most tokens of the answer; 0 if the prompt alone is too long.
        exact: False if the prompt may have more tokens.
    """

    def __init__(
        self, parameter: str, message: str, limit: int, prompt: int, answer: int = 0, *, exact: bool = False
    ) -> None:
        super().__init__(parameter, message)
        self.limit = limit
        self.prompt = prompt
        self.answer = answer
        self.exact = exact


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of the next token from a model's logits.

    Attributes:
        temperature: 0 chooses the likeliest token, and so does any below `LEAST_TEMPERATURE`.
        top_k: number of likeliest tokens to choose from; 0 for all.
        top_p: smallest share of the probability that the likeliest tokens together must have.
        min_p: least probability of a token, relative to the likeliest one.
        repetition_penalty: between 0.01 and 100; divisor for the logits of tokens of prompt and answer.
        presence_penalty: subtracted once for each token of the answer.
        frequency_penalty: subtracted as often as the token occurs in the answer.
        logit_bias: pairs of token and addend.
        seed: key of the random generator. The position in the answer is its counter.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def penalizes(self) -> bool:
        """True if the tokens written so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """Language that an answer must belong to.

    ``text`` is a JSON schema, a regular expression, a JSON list of choices or a Lark grammar. It is empty for
    ``json_object``.
    """

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One request to a language model. Compares by identity.

    Attributes:
        prompt: token ids; not empty.
        max_tokens: maximum number of tokens of each choice; 0 scores the prompt only.
        choices: number of answers. Choice ``i`` is sampled with the key (seed, i).
        stop: strings that end a choice; they do not appear in its text.
        stop_tokens: tokens that end a choice, besides the model's own end tokens.
        ignore_end: the model's end tokens do not end a choice.
        min_tokens: number of tokens before which nothing ends a choice except ``max_tokens``.
        logprobs: number of alternatives for each token of the answer; 0 for the token alone, None for no logprobs.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special: the text omits special tokens.
        caller: name of the key or token that the server has checked, "" without one. Steps are shared
            equally between callers, and prompts and grammars are reused for the same caller alone.
        user: the end user whom the request names. Users of one caller share its part of the steps equally.
        priority: of tasks of one caller, those with a lower number are scheduled first.
        deadline_ns: on the engine's clock; 0 for none. At the deadline the task ends with what it has.
        received_ns: time at which the request arrived, on the engine's clock; 0 for the time of ``begin``.
        id: request id, for explanations and traces.
        adapter: name of a LoRA adapter.
        reuse: the prefix cache may be used for the prompt.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    choices: int = 1
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_end: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    skip_special: bool = True
    caller: str = ""
    user: str = ""
    priority: int = 0
    deadline_ns: int = 0
    received_ns: int = 0
    id: str = ""
    adapter: str = ""
    reuse: bool = True


class TokenLogprob(NamedTuple):
    """Log probability of a token, and of the likeliest tokens at its position."""

    token: int
    logprob: float
    rank: int
    """Number of tokens that are at least as likely, 1 for the likeliest."""
    top: tuple[tuple[int, float], ...] = ()


class Usage(NamedTuple):
    """Tokens and times of one choice.

    ``queue_ns``, ``prefill_ns`` and ``decode_ns`` are phases that sum to the duration from ``begin`` to the end. The
    times after ``preemptions`` are measured apart from the phases, and an engine that cannot measure them leaves them
    at 0: together with ``queue_ns`` they sum to the same duration.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    steps: int = 0
    rows_beside: int = 0
    """Sum over the steps of the other rows that ran in them."""
    preemptions: int = 0
    grammar_ns: int = 0
    """Part of ``queue_ns`` in which the grammar was compiled."""
    prompt_steps_ns: int = 0
    """Steps of the model that read the prompt."""
    answer_steps_ns: int = 0
    """Steps of the model that wrote the answer, or computed it again after a preemption."""
    other_steps_ns: int = 0
    """Steps of the model for other rows alone, while this choice had a row."""
    put_back_ns: int = 0
    """Time without a row after a preemption."""
    loop_ns: int = 0
    """Time between the steps: planning, sampling, text and deliveries."""


class End(NamedTuple):
    """End of one choice.

    ``stop`` is the stop string or token that matched, None for the model's end tokens.
    """

    reason: EndReason
    usage: Usage
    stop: str | int | None = None
    error: RemoraError | None = None


class Piece(NamedTuple):
    """Output of one choice in a step.

    ``text`` is what may be shown: no part of a stop string and no incomplete character. It may be empty although there
    are tokens; the held back text follows with a later piece, at the latest with the end.
    """

    task: Task
    choice: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """With the first piece of choice 0, if requested; None for the first token of the prompt."""
    end: End | None = None


class Sink(Protocol):
    """Destination of the pieces of tasks."""

    def take(self, pieces: Sequence[Piece]) -> None:
        """Accept all pieces of a step for the tasks of this sink.

        Called in the engine's thread, once a step; must neither block nor raise. A sink whose client does not read
        keeps the text, whose length ``max_tokens`` limits.
        """


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine's model is and can do.

    Attributes:
        context: maximum number of tokens of prompt and answer together.
        vocabulary: number of token ids.
        end_tokens: tokens by which the model ends an answer.
        max_logprobs: maximum number of alternatives.
        grammars: kinds of grammars that can be enforced.
        unsupported: names of the attributes of `Task` and `Sampling` that must keep their defaults.
        batch_invariant: answers do not depend on what runs beside them.
        fingerprint: identifies weights, tokenizer and numerics; equal fingerprints give equal answers if invariant.
        adapters: names of LoRA adapters.
        max_adapters: number of adapters that one step can use.
    """

    context: int
    vocabulary: int
    end_tokens: frozenset[int] = frozenset()
    max_logprobs: int = 20
    grammars: frozenset[str] = frozenset()
    unsupported: frozenset[str] = frozenset()
    batch_invariant: bool = False
    fingerprint: str = ""
    adapters: tuple[str, ...] = ()
    max_adapters: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of an engine at one moment. Times are sums in nanoseconds."""

    running: int = 0
    waiting: int = 0
    cache_tokens: int = 0
    """Tokens in memory, those for reuse included."""
    reusable_tokens: int = 0
    """Tokens of ended tasks that are kept for reuse."""
    cache_capacity: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    """Both in tokens of prompts."""
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """Number of ended choices by reason."""
    step_ns: int = 0
    """Time spent in the model."""
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters of running and of waiting answers, sorted."""


def check_task(task: Task, facts: ModelFacts) -> None:
    """Raise ParameterError for a task that this model cannot honour.

    Nothing is adjusted silently.
    """
    if not task.prompt:
        raise ParameterError("prompt", "the prompt is empty: give at least one token")
    length = len(task.prompt)
    if length + max(task.max_tokens, 0) > facts.context:
        raise ContextError(
            "max_tokens" if length < facts.context else "prompt",
            f"the prompt has {length} tokens and the answer may have {task.max_tokens}, together "
            f"{length + task.max_tokens}; the context of the model has {facts.context} tokens: shorten the prompt or "
            "reduce max_tokens",
            facts.context,
            length,
            task.max_tokens if length <= facts.context else 0,
            exact=True,
        )
    beyond = next((token for token in task.prompt if not 0 <= token < facts.vocabulary), None)
    if beyond is not None:
        raise ParameterError(
            "prompt", f"the prompt has the token id {beyond}, the vocabulary has the ids 0 to {facts.vocabulary - 1}"
        )
    _check_limits(task, facts)
    _check_sampling(task.sampling, facts)
    for name in sorted(facts.unsupported):
        owner: Task | Sampling = task if hasattr(task, name) else task.sampling
        default = getattr(_DEFAULT_TASK if owner is task else _DEFAULT_TASK.sampling, name)
        if getattr(owner, name) != default:
            raise ParameterError(name, f"this model's engine does not support {name}")


def _check_limits(task: Task, facts: ModelFacts) -> None:
    if task.max_tokens < 0:
        raise ParameterError("max_tokens", f"max_tokens is {task.max_tokens}; it must not be negative")
    if task.max_tokens == 0 and task.choices != 1:
        raise ParameterError("n", "a task without an answer (max_tokens 0) has exactly one choice")
    if not 1 <= task.choices <= MAX_CHOICES:
        raise ParameterError("n", f"n is {task.choices}; it must be between 1 and {MAX_CHOICES}")
    if not 0 <= task.min_tokens <= task.max_tokens:
        raise ParameterError("min_tokens", f"min_tokens is {task.min_tokens}; it must be between 0 and max_tokens")
    if len(task.stop) > MAX_STOPS:
        raise ParameterError("stop", f"stop has {len(task.stop)} strings; at most {MAX_STOPS} are allowed")
    unknown = next((token for token in task.stop_tokens if not 0 <= token < facts.vocabulary), None)
    if unknown is not None:
        raise ParameterError(
            "stop_token_ids", f"stop_token_ids has {unknown}, the vocabulary has the ids 0 to {facts.vocabulary - 1}"
        )
    if any(not each or len(each) > MAX_STOP_CHARACTERS for each in task.stop):
        raise ParameterError("stop", f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    for name, value in (("logprobs", task.logprobs), ("prompt_logprobs", task.prompt_logprobs)):
        if value is not None and not 0 <= value <= facts.max_logprobs:
            raise ParameterError(name, f"{name} is {value}; it must be between 0 and {facts.max_logprobs}")
    if task.grammar is not None and task.grammar.kind not in facts.grammars:
        raise ParameterError("response_format", f"this model's engine cannot enforce a {task.grammar.kind}")
    if task.grammar is not None and (excess := grammar_excess(task.grammar.kind, task.grammar.text)):
        raise ParameterError("response_format", f"the {task.grammar.kind} cannot be enforced: {excess}")
    if task.adapter and task.adapter not in facts.adapters:
        known = ", ".join(facts.adapters) or "none"
        raise ParameterError("model", f"there is no adapter '{task.adapter}'; available: {known}")


def _check_sampling(sampling: Sampling, facts: ModelFacts) -> None:
    ranges = (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.01, 100.0),
        ("presence_penalty", -100.0, 100.0),
        ("frequency_penalty", -100.0, 100.0),
    )
    for name, least, most in ranges:
        value = getattr(sampling, name)
        excluded = name == "top_p" and value == 0
        if not (math.isfinite(value) and least <= value <= most) or excluded:
            bound = f"greater than {least:g} and at most" if name == "top_p" else f"between {least:g} and"
            raise ParameterError(name, f"{name} is {value}; it must be {bound} {most:g}")
    if sampling.top_k < 0:
        raise ParameterError("top_k", f"top_k is {sampling.top_k}; it must be 0 (all tokens) or positive")
    if not 0 <= sampling.seed < _SEED_LIMIT:
        raise ParameterError("seed", f"seed is {sampling.seed}; it must be between 0 and 2^64 - 1")
    if len(sampling.logit_bias) > MAX_BIASES:
        raise ParameterError("logit_bias", f"logit_bias has {len(sampling.logit_bias)} entries; at most {MAX_BIASES}")
    for token, addend in sampling.logit_bias:
        if not 0 <= token < facts.vocabulary:
            raise ParameterError(
                "logit_bias", f"logit_bias has the token id {token}, the vocabulary has 0 to {facts.vocabulary - 1}"
            )
        if not -100 <= addend <= 100:
            raise ParameterError("logit_bias", f"logit_bias of token {token} is {addend}; it must be -100 to 100")


_DEFAULT_TASK = Task((0,), 1)
