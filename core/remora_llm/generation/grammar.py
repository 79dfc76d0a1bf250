"""Enforcement of JSON schemas, regular expressions, choices and Lark grammars.

llguidance is imported with the first grammar. It compiles what `remora_llm.generation.grammar_limits` permits, in
threads with a large stack, a few at once and for a limited time.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import TimeoutError as LateError
from typing import Any

import numpy as np
import numpy.typing as npt

from remora.api.system import run_in_daemon
from remora.errors import ConfigError, InternalError, QueueFullError, UnavailableError
from remora_llm.generation.grammar_limits import GRAMMAR_STACK_BYTES, grammar_excess
from remora_llm.generation.tasks import Grammar, ParameterError

KINDS = frozenset({"json_schema", "json_object", "regex", "choice", "lark"})
_PARAMETER = "response_format"
_AT_ONCE = 2
"""Compilations of one model at the same time."""
_KEPT = 8
"""Compiled grammars that are kept for further choices and requests of the same caller."""
_LARK_ITEMS = 500
"""Items in a row of a Lark grammar. An ambiguous one takes time in their square, while the interpreter waits."""
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""In llguidance's error for a wrong token. All others have their cause in the grammar: a limit, or nothing matches."""


class GrammarCompiler:
    """Compiler of grammars for one tokenizer. Any thread may use it.

    Args:
        tokenizer: text of ``tokenizer.json``.
        vocabulary: number of token ids in the logits.
        end_tokens: tokens that may follow a complete answer.
        time_limit_s: longest compilation, and longest wait for the end of others.
    """

    def __init__(
        self, tokenizer: str, vocabulary: int, end_tokens: Collection[int], *, time_limit_s: float = 5.0
    ) -> None:
        self._content = tokenizer
        self._time_limit_s = time_limit_s
        self._vocabulary = vocabulary
        self._end_tokens = sorted(end_tokens)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._kept: OrderedDict[tuple[str, Grammar], GrammarMatcher] = OrderedDict()
        self._library: Any = None
        self._tokenizer: Any = None

    def compile(self, grammar: Grammar, caller: str = "") -> GrammarMatcher:
        """Return the matcher for one answer.

        A grammar that the same caller has just used is not compiled again. Callers share no compiled grammars, because
        the time of a request would reveal the grammars of others.

        Raises:
            ParameterError: the grammar is wrong, too large or too slow to compile; with the reason.
            QueueFullError: too many grammars are being compiled.
            ConfigError: llguidance is not installed.
        """
        key = (caller, grammar)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known.copy()
        if excess := grammar_excess(grammar.kind, grammar.text):  # again, because an overflow would end the process
            raise ParameterError(_PARAMETER, f"the {grammar.kind} cannot be enforced: {excess}")
        matcher = self._compile_in_thread(grammar)
        with self._lock:
            self._kept[key] = matcher.copy()
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _compile_in_thread(self, grammar: Grammar) -> GrammarMatcher:
        """Compile in a thread with a large stack.

        One that is late continues to its end and keeps its place.
        """
        if not self._places.acquire(timeout=self._time_limit_s):
            raise QueueFullError("too many grammars are being compiled; try again later")

        def work() -> GrammarMatcher:
            try:
                return self._compiled(grammar)
            finally:
                self._places.release()

        try:
            compiling = run_in_daemon(work, "remora grammar", stack_bytes=GRAMMAR_STACK_BYTES)
        except RuntimeError as error:
            self._places.release()
            raise UnavailableError(f"the {grammar.kind} cannot be compiled: {error}") from error
        try:
            return compiling.result(self._time_limit_s)
        except LateError:
            raise ParameterError(
                _PARAMETER, f"the {grammar.kind} takes longer than {self._time_limit_s:g} s to compile: simplify it"
            ) from None

    def _compiled(self, grammar: Grammar) -> GrammarMatcher:
        library = self._open()
        try:
            text = _source_of(grammar, library.LLMatcher)
            limits = library.LLParserLimits(max_items_in_row=_LARK_ITEMS) if grammar.kind == "lark" else None
            matcher = library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
            reason = matcher.get_error()
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error)
        if reason:
            raise ParameterError(_PARAMETER, f"the {grammar.kind} cannot be enforced: {' '.join(reason.split())[:500]}")
        return GrammarMatcher(matcher, self._vocabulary)

    def _open(self) -> Any:
        with self._opening:
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

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary)

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
