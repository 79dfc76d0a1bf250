"""Answer of one choice: tokens from logits, text from tokens, and the end.

Invariant: text, tokens and end depend on the logits alone, not on how steps deliver them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from remora_llm.generation import Logits, Sink, Tokens
from remora_llm.generation.sampling import Sampler, prompt_logprobs
from remora_llm.generation.stopping import StopSearch
from remora_llm.generation.tasks import EndReason, ModelFacts, Piece, Task, TokenLogprob

_log = logging.getLogger("remora.generation")


class Matcher(Protocol):
    """State of a grammar for one answer."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token whether it may come next."""

    def accept(self, token: int) -> None:
        """Advance by a token. Raises InternalError for one that is not allowed."""

    @property
    def done(self) -> bool:
        """True if the answer is complete and nothing may follow."""


class Written(NamedTuple):
    """Result of one token."""

    token: int
    text: str
    logprob: TokenLogprob | None
    reason: EndReason | None = None
    stop: str | int | None = None


class Answer:
    """State of one choice.

    Args:
        task, choice: what is answered.
        facts: of the model.
        tokens: its tokenizer.
        matcher: enforces the task's grammar.
    """

    __slots__ = ("_detokenizer", "_enders", "_facts", "_matcher", "_sampler", "_scores", "_search", "_task", "count")

    def __init__(
        self, task: Task, choice: int, facts: ModelFacts, tokens: Tokens, matcher: Matcher | None = None
    ) -> None:
        self._task = task
        self._facts = facts
        self._enders = task.stop_tokens if task.ignore_end else task.stop_tokens | facts.end_tokens
        banned = task.stop_tokens | facts.end_tokens
        self._sampler = Sampler(task, choice, banned)
        self._detokenizer = tokens.detokenizer(skip_special=task.skip_special)
        self._search = StopSearch(task.stop)
        self._matcher = matcher
        self._scores: list[TokenLogprob | None] = [None]
        self.count = 0
        """Number of tokens of the answer."""

    def score_prompt(self, start: int, logits: Logits) -> None:
        """Keep the log probabilities of prompt tokens, given the logits from ``start`` on."""
        task = self._task
        assert task.prompt_logprobs is not None
        following = task.prompt[start + 1 : start + 1 + len(logits)]
        scores = prompt_logprobs(logits[: len(following)], following, task.prompt_logprobs)
        self._scores[start + 1 :] = scores  # a run that was put back scores its prompt again

    @property
    def prompt_scores(self) -> tuple[TokenLogprob | None, ...]:
        """The log probabilities of the prompt; None for its first token."""
        return tuple(self._scores)

    def write(self, logits: Any) -> Written:
        """Choose the next token from one row of logits.

        Raises:
            InternalError: the logits are not finite.
        """
        allowed = self._matcher.allowed() if self._matcher is not None else None
        token, logprob = self._sampler.choose(logits, self.count, allowed)
        self._sampler.accept(token)
        return self.append(token, logprob)

    def append(self, token: int, logprob: TokenLogprob | None) -> Written:
        """Append a token that has been chosen."""
        task, matcher = self._task, self._matcher
        self.count += 1
        ends = self.count > task.min_tokens or task.min_tokens == 0
        if ends and token in self._enders:
            shown, stop = self._rest("")
            return Written(token, shown, logprob, "stop", stop or (token if token in task.stop_tokens else None))
        if matcher is not None:
            matcher.accept(token)
        text = self._detokenizer.feed(token)
        if self.count >= task.min_tokens:
            text = self._search.feed(text)
            if self._search.matched is not None:
                return Written(token, text, logprob, "stop", self._search.matched)
        done = matcher is not None and matcher.done
        if done or self.count >= task.max_tokens:
            shown, stop = self._rest(text)
            return Written(token, shown, logprob, "stop" if done or stop is not None else "length", stop)
        return Written(token, text, logprob)

    def finish(self) -> str:
        """Return the text that was held back, for an end from outside."""
        return self._rest("")[0]

    def _rest(self, text: str) -> tuple[str, str | None]:
        """Return text with all that was held back, and the stop string that this completed."""
        text += self._search.feed(self._detokenizer.flush())
        if self._search.matched is not None:
            return text, self._search.matched
        return text + self._search.flush(), None


class Outbox:
    """Pieces of a step by sink. Each sink gets all of them in one call.

    Args:
        name: of the model, for the log.
        cancel: cancels a task whose sink failed.
    """

    __slots__ = ("_cancel", "_name", "_pending")

    def __init__(self, name: str, cancel: Callable[[Task], None]) -> None:
        self._name = name
        self._cancel = cancel
        self._pending: dict[int, tuple[Sink, list[Piece]]] = {}

    def post(self, sink: Sink, piece: Piece) -> None:
        """Keep a piece until `deliver`."""
        self._pending.setdefault(id(sink), (sink, []))[1].append(piece)

    def deliver(self) -> None:
        """Give each sink its pieces."""
        pending, self._pending = self._pending, {}
        for sink, pieces in pending.values():
            try:
                sink.take(pieces)
            except Exception:  # a fault of one sink must not reach the tasks of others
                _log.exception("a sink of model '%s' failed; its tasks are cancelled", self._name)
                for piece in pieces:
                    self._cancel(piece.task)
