"""Protocols ``TokenEngine``, ``Stepper`` and ``Sink`` of language models.

A ``TokenEngine`` runs tasks and decides which of them share a step; libraries with their own scheduler implement it. A
``Stepper`` computes one forward pass; ``remora_llm.generation.step_loop`` makes a TokenEngine of it. A backend's model
offers both sides to the front ends as a `Generation` in its attribute ``generation``.

Invariant: this package imports no framework at its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from remora_llm.generation.measurements import Measurements
from remora_llm.generation.tasks import EngineStats, ModelFacts, Piece, Sink, Task

Logits = npt.NDArray[np.float32]


class TokenEngine(Protocol):
    """Engine that runs tasks of one model.

    It records its answers in ``measurements``, in one thread: metrics and explanations are made of them.

    Invariants: each choice of a task that began gets exactly one piece with an end, its last one. After ``cancel``
    returned, at most the step in progress computes a token of the task.
    """

    facts: ModelFacts
    measurements: Measurements

    def begin(self, task: Task, sink: Sink) -> None:
        """Queue a task. Any thread may call this.

        Raises:
            ParameterError: the model cannot honour the task.
            QueueFullError: too many tasks wait.
            UnavailableError: the engine is closed, or failed and cannot be rebuilt.
        """

    def cancel(self, task: Task) -> None:
        """End a task early.

        Any thread may call this, any number of times; unknown tasks are ignored. The sink gets the ends with the reason
        ``cancelled``.
        """

    def stats(self) -> EngineStats:
        """Return counters and gauges. Any thread may call this."""

    def close(self) -> None:
        """End all tasks with UnavailableError and release the engine. Called once."""


class Extension(NamedTuple):
    """Tokens to append to one row of a stepper.

    ``start`` is the number of tokens that the row has. ``wanted`` is the number of last positions whose logits are
    needed; 0 for none. One token in a row that has some is a decode step; more are prefill. An engine with exact
    repeatability depends on the difference, because kernels for one position may round otherwise.
    """

    row: int
    start: int
    tokens: Sequence[int]
    wanted: int = 1


class StepResult(NamedTuple):
    """Logits of a step, valid until the next step.

    For each extension there is an array [wanted, vocabulary] of float32.
    """

    logits: Sequence[Logits]


class Stepper(Protocol):
    """One forward pass of given rows; without queue, clock or threads.

    Only one thread uses a stepper. ``rows`` is the number of rows that can be in memory at once, ``length`` the maximum
    number of tokens of a row. ``decode_first`` is True if the rows of decode steps must be the first rows, without
    gaps.
    """

    facts: ModelFacts
    rows: int
    length: int
    decode_first: bool

    def step(self, extensions: Sequence[Extension]) -> StepResult:
        """Append tokens to rows and return the logits.

        An exception means that the contents of the extended rows are undefined.
        """

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of a row to another row."""

    def close(self) -> None:
        """Release memory."""


class Detokenizer(Protocol):
    """Incremental conversion of one answer's tokens to text."""

    def feed(self, token: int) -> str:
        """Return the characters that are complete with this token."""

    def flush(self) -> str:
        """Return what was held back at the end of the answer; incomplete characters become U+FFFD."""


class Tokens(Protocol):
    """Conversion between text and tokens of one model. Any thread may use it.

    ``longest`` is the largest number of bytes of a text that become one token.
    """

    @property
    def longest(self) -> int: ...

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, most: int = 0
    ) -> tuple[int, ...]:
        """Return the tokens of a text.

        ``add_special`` adds what the model expects around a text, such as a token for its beginning. With
        ``parse_special`` special tokens written in the text become control tokens. A text with many more than ``most``
        tokens is refused with ParameterError before it is tokenized whole; 0 for any text.
        """

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens. Raises ParameterError for an id that the vocabulary lacks."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; those of its name for a special token."""

    def token_name(self, token: int) -> str:
        """Return a token as the vocabulary writes it, "" for an id that it lacks."""

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """Return a detokenizer for one answer."""


class ChatTemplate(Protocol):
    """Template of a model that renders a chat as a prompt."""

    source: str

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
        most: int = 0,
    ) -> tuple[int, ...]:
        """Return the tokens of the prompt.

        Special tokens in messages stay text. ``arguments`` are additional variables (``chat_template_kwargs``).
        Messages with many more than ``most`` tokens are refused before they are rendered; 0 for any.

        Raises:
            ParameterError: the template refuses the messages; with its words. Or the prompt is too long.
        """


@dataclass(frozen=True, slots=True)
class Generation:
    """Generative side of an opened model, as front ends use it.

    Attributes:
        engine: runs the tasks.
        tokens: the tokenizer.
        chat: the chat template; None if the model has none.
        defaults: sampling parameters that the model's folder recommends, by their names in `Sampling`.
        default_max_tokens: limit of an answer where the request sets none; 0 for the rest of the context.
        served_names: additional names for OpenAI's ``model``.
        tool_parser: name of the parser for tool calls, "" for none; see `remora_llm.generation.tool_calls`.
    """

    engine: TokenEngine
    tokens: Tokens
    chat: ChatTemplate | None = None
    defaults: Mapping[str, float] | None = None
    default_max_tokens: int = 0
    served_names: tuple[str, ...] = ()
    tool_parser: str = ""


__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "EngineStats",
    "Extension",
    "Generation",
    "Logits",
    "Measurements",
    "ModelFacts",
    "Piece",
    "Sink",
    "StepResult",
    "Stepper",
    "Task",
    "TokenEngine",
    "Tokens",
]
