"""Tests of ``remora_llm.generation.grammar`` with a model whose logits are random."""

from __future__ import annotations

import json
import re
import threading
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from remora.errors import InternalError, QueueFullError
from remora_llm.generation.grammar import GrammarCompiler
from remora_llm.generation.tasks import Grammar, ParameterError
from remora_llm.generation.tokenizing import TokenizerFile
from support.models.generation_models import tiny
from support.process.eventually import eventually

pytest.importorskip("llguidance")
END = 2


@cache
def parts() -> tuple[TokenizerFile, GrammarCompiler]:
    content = (tiny(Path(mkdtemp())) / "tokenizer.json").read_text()
    tokens = TokenizerFile(content, "tiny")
    return tokens, GrammarCompiler(content, tokens.vocabulary, {END})


def written(grammar: Grammar, seed: int) -> str:
    """Return what random logits write under a grammar."""
    tokens, compiler = parts()
    matcher, random = compiler.compile(grammar), np.random.default_rng(seed)
    answer: list[int] = []
    for _ in range(2000):
        allowed = matcher.allowed()
        assert allowed.any()
        token = int(np.where(allowed, random.standard_normal(tokens.vocabulary), -np.inf).argmax())
        if token == END:
            break
        matcher.accept(token)
        answer.append(token)
        if matcher.done:
            break
    else:
        raise AssertionError("the answer did not end")
    return tokens.decode(answer)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_random_model_writes_what_the_grammar_permits(seed: int) -> None:
    answer: Any = json.loads(written(Grammar("json_schema", json.dumps(SCHEMA)), seed))
    assert set(answer) == {"city", "unit"}
    assert answer["unit"] in ("celsius", "fahrenheit")
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", written(Grammar("regex", r"[0-9]{3}-[a-f]{2}"), seed))
    choices = ["yes", 'a "quoted" word', "Größe"]
    assert written(Grammar("choice", json.dumps(choices)), seed) in choices
    assert written(Grammar("lark", 'start: "a" ("b" | "c") "d"'), seed) in ("abd", "acd")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"type": "nothing"}'),
        Grammar("json_schema", '{"$ref": "#/missing"}'),
        Grammar("regex", "("),
        Grammar("regex", "a" * (1 << 21)),
        Grammar("lark", "start: missing"),
        Grammar("choice", "5"),
    ],
    ids=lambda grammar: f"{grammar.kind}-{grammar.text[:12]}",
)
def test_a_grammar_that_cannot_be_enforced_is_refused_with_the_reason(grammar: Grammar) -> None:
    _, compiler = parts()
    with pytest.raises(ParameterError) as raised:
        compiler.compile(grammar)
    assert raised.value.parameter == "response_format"


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    tokens, compiler = parts()
    matcher = compiler.compile(Grammar("regex", "a"))
    (other,) = tokens.encode("b")
    with pytest.raises(InternalError, match="grammar failed"):
        matcher.accept(other)


class CountingLibrary:
    """llguidance with matchers that are compiled when ``released`` is set."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.released = threading.Event()

    def LLMatcher(self, _tokenizer: object, text: str, **_: object) -> CountingMatcher:  # noqa: N802  # its name there
        assert self.released.wait(30)
        self.compiled.append(text)
        return CountingMatcher()

    def LLParserLimits(self, **_: object) -> None:  # noqa: N802  # its name there
        return None


class CountingMatcher:
    """Matcher of `CountingLibrary`."""

    def get_error(self) -> str:
        return ""

    def deep_copy(self) -> CountingMatcher:
        return CountingMatcher()


def counting_compiler(time_limit_s: float) -> tuple[GrammarCompiler, CountingLibrary]:
    compiler, library = GrammarCompiler("", 10, {END}, time_limit_s=time_limit_s), CountingLibrary()
    library.LLMatcher.__func__.grammar_from_regex = lambda text: text  # type: ignore[attr-defined]
    compiler._library = library
    return compiler, library


def test_a_grammar_is_compiled_once_for_all_choices_of_a_caller_and_again_for_another() -> None:
    compiler, library = counting_compiler(time_limit_s=30)
    library.released.set()
    matchers = [compiler.compile(Grammar("regex", "a"), caller) for caller in ("one", "one", "two", "one", "two")]
    assert library.compiled == ["a", "a"]
    assert len({id(matcher._matcher) for matcher in matchers}) == 5


def test_a_compilation_that_takes_too_long_is_refused_and_few_run_at_once() -> None:
    compiler, library = counting_compiler(time_limit_s=0.01)
    for text in ("a", "b"):
        with pytest.raises(ParameterError, match=r"takes longer than 0\.01 s to compile"):
            compiler.compile(Grammar("regex", text))
    with pytest.raises(QueueFullError, match="too many grammars are being compiled"):
        compiler.compile(Grammar("regex", "c"))
    library.released.set()  # from here on the two end, and their places are free
    eventually(lambda: len(library.compiled) == 2)
    assert compiler._places.acquire(timeout=30)
    assert compiler._places.acquire(timeout=30)
