"""Chat templates, rendered in a sandbox under limits of size and time.

Invariants: a template comes from the model's folder, never from a request. A special token in a message stays text: it
cannot end the message or begin another.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from remora.errors import ConfigError
from remora_llm.generation.tasks import ContextError, ParameterError

_SIZE_LIMIT = 8 << 20
_TIME_LIMIT_NS = 5_000_000_000
_DEPTH_LIMIT = 64
_PART_CHARACTERS = 1 << 16
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that Unicode reserves for a process's own use."""


class _RefusedError(Exception):
    """Raised by a template's ``raise_exception``."""


class TemplateTokens(Protocol):
    """What a template needs of a tokenizer; ``special`` has the special tokens' texts by id."""

    @property
    def special(self) -> Mapping[int, str]: ...

    @property
    def longest(self) -> int:
        """Largest number of bytes of a text that become one token."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, most: int = 0
    ) -> tuple[int, ...]:
        """Return the tokens of a text; see `remora_llm.generation.Tokens`."""


class JinjaTemplate:
    """Compiled chat template of a model. Any thread may use it.

    Args:
        source: the template's text.
        tokens: the model's tokenizer.
        special: variables such as ``bos_token``.
        name: name of the model, for errors.
        now_ns: monotonic clock for the time limit.
        date: formats the current date as ``strftime``.

    Raises:
        ConfigError: jinja2 is not installed, or the template has a syntax error.
    """

    def __init__(
        self,
        source: str,
        tokens: TemplateTokens,
        special: Mapping[str, str],
        name: str,
        now_ns: Callable[[], int],
        date: Callable[[str], str],
    ) -> None:
        self.source = source
        self.takes_parts = re.search(r"""(\[['"]type['"]\]|\.type\b|is (not )?string)""", source) is not None
        """True if the template handles contents that are lists of parts."""
        self._tokens = tokens
        self._special = dict(special)
        self._now = now_ns
        try:
            self._library: Any = importlib.import_module("jinja2")
        except ImportError as error:
            from remora.system.install_advice import install_command

            raise ConfigError(
                f"model '{name}' has a chat template, which needs jinja2 ({error}): {install_command('generation')}"
            ) from error
        names = sorted((text for text in tokens.special.values() if len(text) > 1), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._longest_name = max(map(len, names), default=0)
        try:
            self._template: Any = _environment(date).from_string(source)
        except self._library.TemplateSyntaxError as error:
            raise ConfigError(f"model '{name}': its chat template, line {error.lineno}: {error.message}") from error

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
        """Return the tokens of the prompt; see `remora_llm.generation.ChatTemplate`."""
        if most:
            self._refuse_long(messages, most)
        text, mark = self._text(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=arguments,
        )
        if mark is None:
            return self._tokens.encode(text, add_special=False, most=most)
        return self._encode_marked(text, mark, most)

    def render_text(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt as text, with the options of `render`."""
        text, mark = self._text(messages, **options)
        return text if mark is None else text.replace(mark, "")

    def _refuse_long(self, messages: Sequence[Mapping[str, Any]], most: int) -> None:
        """Raise ContextError for messages that cannot fit into ``most`` tokens."""
        if len(messages) > most:
            raise ContextError(
                "messages",
                f"there are {len(messages)} messages; at most {most} tokens are possible here: send fewer",
                most,
                len(messages),
            )
        size, limit = 0, most * self._tokens.longest
        for text in _texts(messages, 0):
            size += len(text)
            if size > limit:
                raise ContextError(
                    "messages",
                    f"the messages have more than {limit} characters, which {most} tokens, the most that are possible "
                    "here, cannot hold: shorten them",
                    most,
                    most + 1,
                )

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, str | None]:
        """Return the rendered text, and the mark inside special tokens of messages if there are any."""
        if continue_final_message and add_generation_prompt:
            raise ParameterError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        if arguments and (names := {"chat_template", "messages", "tools"} & set(arguments)):
            raise ParameterError("chat_template_kwargs", f"chat_template_kwargs must not have {sorted(names)[0]}")
        chat = [{**message, "content": self._content(message.get("content"))} for message in messages]
        whole: dict[str, Any] = {"messages": chat, "tools": list(tools) or None, "arguments": dict(arguments or {})}
        mark = self._mark_for(whole)
        if mark is not None:
            whole = _replaced(
                whole, lambda text: self._names.sub(lambda found: found[0][0] + mark + found[0][1:], text)
            )
        variables = {
            **self._special,
            **whole["arguments"],
            "messages": whole["messages"],
            "tools": whole["tools"],
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(variables)
        if continue_final_message:
            text = _cut_after_last(text, whole["messages"])
        return text, mark

    def _content(self, content: Any) -> Any:
        """Return a message's content.

        Its parts become the lines of one text if the template expects a text.
        """
        if not isinstance(content, list):
            return content
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise ParameterError("messages", f"a message has a part of the type {kind!r}; only text is supported")
        return content if self.takes_parts else "\n".join(part["text"] for part in content)

    def _mark_for(self, whole: Mapping[str, Any]) -> str | None:
        """Return a character that is in no text if a text has a special token, else None."""
        texts = list(_texts(whole, 0))
        if not any(self._has_name(text) for text in texts):
            return None
        for mark in _NONCHARACTERS:
            if not any(mark in text for text in texts):
                return mark
        raise ParameterError("messages", "the messages contain all of Unicode's noncharacters")

    def _has_name(self, text: str) -> bool:
        """Return True if a text has a special token.

        The search is in parts, between which other threads run.
        """
        return any(
            self._names.search(text, begin, begin + _PART_CHARACTERS + self._longest_name) is not None
            for begin in range(0, len(text), _PART_CHARACTERS)
        )

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        parts, size, begin_ns = [], 0, self._now()
        try:
            for part in self._template.generate(**variables):
                parts.append(part)
                size += len(part)
                if size > _SIZE_LIMIT or self._now() - begin_ns > _TIME_LIMIT_NS:
                    raise ParameterError(
                        "messages", "the chat template takes too long or makes too much of these messages"
                    )
        except ParameterError:
            raise
        except _RefusedError as error:
            raise ParameterError("messages", str(error)) from error
        except Exception as error:  # a template may do anything with messages that it does not expect
            raise ParameterError(
                "messages", f"the chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from error
        return "".join(parts)

    def _encode_marked(self, text: str, mark: str, most: int) -> tuple[int, ...]:
        """Encode a text in which special tokens count only without the mark."""
        tokens: list[int] = []
        at = 0
        for found in self._names.finditer(text):
            tokens += self._plain(text[at : found.start()], mark, most)
            tokens += self._tokens.encode(found[0], add_special=False)
            at = found.end()
            if most and len(tokens) > 2 * most:
                raise ContextError(
                    "messages",
                    f"the prompt has more than {2 * most} tokens; at most {most} are possible: shorten it",
                    most,
                    2 * most + 1,
                )
        tokens += self._plain(text[at:], mark, most)
        return tuple(tokens)

    def _plain(self, text: str, mark: str, most: int) -> tuple[int, ...]:
        if not text:
            return ()
        return self._tokens.encode(text.replace(mark, ""), add_special=False, parse_special=False, most=most)


def _environment(date: Callable[[str], str]) -> Any:
    """Return the sandbox, with what templates of the Hugging Face ecosystem expect."""
    sandbox = importlib.import_module("jinja2.sandbox")
    nodes = importlib.import_module("jinja2.nodes")
    extension: Any = importlib.import_module("jinja2.ext").Extension

    class Generated(extension):  # type: ignore[misc]  # the class is only known at run time
        """The block ``generation``, which marks answers for training and has no effect here."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.If(nodes.Const(True), body, [], []).set_lineno(line)

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generated]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = date
    return made


def _refuse(message: object) -> None:
    raise _RefusedError(str(message))


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _texts(value: Any, depth: int) -> Iterable[str]:
    """Yield all texts in nested containers. Raises ParameterError if they are too deep."""
    if depth > _DEPTH_LIMIT:
        raise ParameterError("messages", f"the messages are nested deeper than {_DEPTH_LIMIT} levels")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key, depth + 1)
            yield from _texts(each, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, depth + 1)


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    """Return nested containers with all texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_replaced(key, change): _replaced(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, change) for each in value]
    return value


def _cut_after_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt up to the end of its last message's content."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        content = content[-1].get("text") if content else None
    if not isinstance(content, str) or not content.strip():
        raise ParameterError("continue_final_message", "the last message has no text that could be continued")
    place = text.rfind(content.strip())
    if place < 0:
        raise ParameterError("continue_final_message", "the chat template changes the last message's text")
    return text[: place + len(content.strip())]
