"""Renders the chart's templates: the few words of Helm's language that they are kept to, and nothing beyond.

Words: paths (.Values.a.b, .Release.Name, .), texts, numbers, pipelines, brackets, if / else / end, range, and the
functions of `_FUNCTIONS`. A word that is not among them raises ValueError, so the templates cannot outgrow this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_TAG = re.compile(r"(?P<before>\s*)\{\{-\s*(?P<trimmed>.*?)\s*\}\}|\{\{\s*(?P<plain>.*?)\s*\}\}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+')


class Piece(NamedTuple):
    """A piece of a template: text to copy (``code`` empty), or code to obey."""

    text: str
    code: str


def render(chart: Path, release: str, **values: Any) -> dict[str, str]:
    """The chart's files as text: the defaults with ``values`` laid over them, one level deep in each section."""
    known = yaml.safe_load((chart / "values.yaml").read_text())
    for key, value in values.items():
        known[key] = {**known[key], **value} if isinstance(value, dict) else value
    scope = {"Values": known, "Release": {"Name": release}}
    return {path.name: rendered(path.read_text(), scope) for path in sorted((chart / "templates").iterdir())}


def rendered(template: str, scope: Any) -> str:
    """One template as text. Raises ValueError for words that are not known and for values that are not there."""
    pieces: list[Piece] = []
    place = 0
    for tag in _TAG.finditer(template):
        pieces.append(Piece(template[place : tag.start()], ""))
        pieces.append(Piece("", tag["trimmed"] if tag["trimmed"] is not None else tag["plain"]))
        place = tag.end()
    pieces.append(Piece(template[place:], ""))
    text, left = _block(pieces, scope, scope)
    if left:
        raise ValueError(f"{left[0].code}: closes nothing")
    return text


def _block(pieces: Sequence[Piece], scope: Any, dot: Any) -> tuple[str, Sequence[Piece]]:
    """The text of a block, up to the else or end that closes it; and what is left, that word first."""
    out = []
    while pieces:
        head, pieces = pieces[0], pieces[1:]
        word, _, rest = head.code.partition(" ")
        if not head.code:
            out.append(head.text)
        elif word in ("else", "end"):
            return "".join(out), [head, *pieces]
        elif word in ("if", "range"):
            yes, pieces = _block(pieces, scope, dot) if word == "if" else ("", pieces)
            if word == "if":
                no, pieces = _block(pieces[1:], scope, dot) if pieces and pieces[0].code == "else" else ("", pieces)
                out.append(yes if value_of(rest, scope, dot) else no)
            else:
                body = pieces
                _, pieces = _block(body, scope, "")
                out.extend(_block(body, scope, each)[0] for each in value_of(rest, scope, dot))
            if not pieces or pieces[0].code != "end":
                raise ValueError(f"{head.code}: never closed")
            pieces = pieces[1:]
        else:
            value = value_of(head.code, scope, dot)
            out.append(json.dumps(value) if isinstance(value, bool) else str(value))
    return "".join(out), pieces


def value_of(code: str, scope: Any, dot: Any) -> Any:
    """What an expression says."""
    words = _WORD.findall(code)
    value, left = _pipeline(words, scope, dot)
    if left:
        raise ValueError(f"{code}: {left[0]} closes nothing")
    return value


def _pipeline(words: list[str], scope: Any, dot: Any) -> tuple[Any, list[str]]:
    value, words = _call(words, scope, dot, ())
    while words and words[0] == "|":
        value, words = _call(words[1:], scope, dot, (value,))
    return value, words


def _call(words: list[str], scope: Any, dot: Any, last: tuple[Any, ...]) -> tuple[Any, list[str]]:
    name, words = words[0], words[1:]
    function = _FUNCTIONS.get(name)
    arguments = [] if function else [_word(name, scope, dot)]
    if name == "(":
        value, words = _pipeline(words, scope, dot)
        arguments, words = [value], words[1:]
    while function and words and words[0] not in ("|", ")"):
        if words[0] == "(":
            value, words = _pipeline(words[1:], scope, dot)
            words = words[1:]
        else:
            value, words = _word(words[0], scope, dot), words[1:]
        arguments.append(value)
    return (function(*arguments, *last) if function else arguments[0]), words


def _word(word: str, scope: Any, dot: Any) -> Any:
    if word == "(":
        return None
    if word == ".":
        return dot
    if word[0] == '"':
        return json.loads(word)
    if word.isdigit():
        return int(word)
    if not word.startswith("."):
        raise ValueError(f"{word}: not among the words that the templates are kept to")
    value = scope
    for part in word[1:].split("."):
        if part not in value:
            raise ValueError(f"{word}: there is no such value")
        value = value[part]
    return value


def _printf(form: str, *values: Any) -> str:
    left = iter(values)
    return re.sub(r"%[sv]", lambda _: str(next(left)), form)


def _nindent(width: int, text: str) -> str:
    return "\n" + "\n".join(" " * width + line for line in text.splitlines())


def _product(*factors: int) -> int:
    product = 1
    for factor in factors:
        product *= factor
    return product


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "contains": lambda part, text: part in text,
    "default": lambda fallback, value: value or fallback,
    "eq": lambda a, b: a == b,
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "add": lambda *values: sum(values),
    "div": lambda a, b: a // b,
    "mul": _product,
    "nindent": _nindent,
    "not": lambda value: not value,
    "printf": _printf,
    "quote": lambda value: json.dumps(str(value)),
    "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=not value).rstrip("\n"),
}
