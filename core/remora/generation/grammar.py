"""Enforcement of JSON schemas, regular expressions, choices and Lark grammars.

llguidance is imported with the first grammar. Compilation runs in the caller's thread, under llguidance's own limits on
the size of grammar and automaton.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from remora.errors import ConfigError, InternalError
from remora.generation.tasks import Grammar, ParameterError

KINDS = frozenset({"json_schema", "json_object", "regex", "choice", "lark"})
_PARAMETER = "response_format"
_SIZE_LIMIT = 1 << 20
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""In llguidance's error for a wrong token. All others have their cause in the grammar: a limit, or nothing matches."""


class GrammarCompiler:
    """Compiler of grammars for one tokenizer. Any thread may use it.

    Args:
        tokenizer: text of ``tokenizer.json``.
        vocabulary: number of token ids in the logits.
        end_tokens: tokens that may follow a complete answer.
    """

    def __init__(self, tokenizer: str, vocabulary: int, end_tokens: Collection[int]) -> None:
        self._content = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = sorted(end_tokens)
        self._lock = threading.Lock()
        self._library: Any = None
        self._tokenizer: Any = None

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Return the matcher for one answer.

        Raises:
            ParameterError: the grammar is wrong or too large; with llguidance's reason.
            ConfigError: llguidance is not installed.
        """
        if len(grammar.text) > _SIZE_LIMIT:
            raise ParameterError(_PARAMETER, f"the {grammar.kind} has more than {_SIZE_LIMIT} characters")
        library = self._open()
        try:
            text = _source_of(grammar, library.LLMatcher)
            matcher = library.LLMatcher(self._tokenizer, text, log_level=0)
            reason = matcher.get_error()
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error)
        if reason:
            raise ParameterError(_PARAMETER, f"the {grammar.kind} cannot be enforced: {' '.join(reason.split())[:500]}")
        return GrammarMatcher(matcher, self._vocabulary)

    def _open(self) -> Any:
        with self._lock:
            if self._library is None:
                try:
                    library = importlib.import_module("llguidance")
                except ImportError as error:
                    from remora.system.install_advice import install_command

                    raise ConfigError(
                        f"grammars need the package llguidance, which cannot be imported ({error}): "
                        f"{install_command('generation')}"
                    ) from error
                ends: Any = self._end_tokens or None
                self._tokenizer = library.LLTokenizer(self._content, n_vocab=self._vocabulary, eos_token=ends)
                self._library = library
            return self._library


def _source_of(grammar: Grammar, matcher: Any) -> str:
    """Return llguidance's text of a grammar. Raises ValueError."""
    source: str
    if grammar.kind in ("json_schema", "json_object"):
        schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
        json.loads(schema)
        source = matcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    elif grammar.kind == "regex":
        source = matcher.grammar_from_regex(grammar.text)
    elif grammar.kind == "choice":
        # a JSON string without escapes of surrogates is a Lark string, too
        words = [json.dumps(str(each), ensure_ascii=False) for each in json.loads(grammar.text)]
        source = matcher.grammar_from_lark(f"start: {' | '.join(words)}")
    else:
        source = matcher.grammar_from_lark(grammar.text)
    return source


class GrammarMatcher:
    """State of a grammar for one answer; used by one thread at a time.

    Args:
        matcher: llguidance's.
        vocabulary: number of token ids in the logits.
    """

    __slots__ = ("_matcher", "_vocabulary")

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token whether it may come next.

        Raises:
            ParameterError: the grammar is too complex, which its compilation does not always find, or nothing matches.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].view(np.bool_)

    def accept(self, token: int) -> None:
        """Advance by a token.

        Raises:
            InternalError: the token is not allowed.
            ParameterError: the grammar is too complex.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def done(self) -> bool:
        """True if the answer is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        reason = self._matcher.get_error()
        if not reason:
            return
        reason = " ".join(reason.partition("<state>")[0].split())[:500]  # without the state that llguidance appends
        if _NOT_ALLOWED in reason:
            raise InternalError(f"the grammar failed: {reason}")
        raise ParameterError(_PARAMETER, f"the grammar cannot be enforced: {reason}")
