"""Tokenizer of OpenVINO GenAI behind remora's interface for text and tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from remora_llm.generation.tasks import ParameterError
from remora_llm.generation.tokenizing import UNKNOWN_BYTES, ByteDetokenizer, WindowDetokenizer, refuse_long

_SPACE = "\u2581".encode()
_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class VocabularyTokens:
    """Conversion by OpenVINO's tokenizer. Any thread may use it.

    OpenVINO always reads special tokens in a text as control tokens. Where they must stay text, they are cut in two
    and both parts are encoded apart from each other.

    Args:
        tokenizer: ``openvino_genai.Tokenizer``.
        special: texts of the special tokens by id.
    """

    def __init__(self, tokenizer: Any, special: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self.special = dict(special)
        names = sorted((text for text in special.values() if len(text) > 1), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        vocabulary: dict[bytes, int] = tokenizer.get_vocab()
        self.vocabulary = max(vocabulary.values(), default=-1) + 1
        table = [b""] * self.vocabulary
        for name, number in vocabulary.items():
            table[number] = name if isinstance(name, bytes) else str(name).encode()
        self.longest = max(UNKNOWN_BYTES, max(map(len, table), default=1))
        self._joined = not any(name.startswith(_SPACE) for name in table)
        """True if the text of tokens is that of their bytes, joined."""
        self._table = table if self._joined else [_plain(name) for name in table]

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, most: int = 0
    ) -> tuple[int, ...]:
        """Return the tokens of a text; see `remora_llm.generation.Tokens`."""
        try:
            if most:
                refuse_long(text, most, self.longest, lambda part: len(self.encode(part)))
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError("prompt", "the text contains a lone surrogate, which has no UTF-8 form") from error
        parts = [text] if parse_special else _cut(text, self._names)
        found: list[int] = []
        for place, part in enumerate(parts):
            made = self._tokenizer.encode(part, add_special_tokens=add_special and not place)
            found += made.input_ids.data.reshape(-1).tolist()
        return tuple(found)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens. Raises ParameterError for an id that the vocabulary lacks."""
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise ParameterError("tokens", f"token id {token} is beyond the vocabulary of {self.vocabulary} tokens")
        if not self._joined:
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
            return text
        kept = (self._table[token] for token in tokens if not (skip_special and token in self.special))
        return b"".join(kept).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; those of its name for a special token."""
        return self._table[token] if 0 <= token < self.vocabulary else b""

    def token_name(self, token: int) -> str:
        """Return the text of a token's bytes, "" for an id that the vocabulary lacks."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special: bool = True) -> ByteDetokenizer | WindowDetokenizer:
        """Return a detokenizer for one answer."""
        if self._joined:
            return ByteDetokenizer(self._table, self.special if skip_special else {})
        return WindowDetokenizer(lambda tokens: self.decode(tokens, skip_special=skip_special))


def _cut(text: str, names: re.Pattern[str]) -> list[str]:
    """Return the text, divided behind the first character of each special token's name."""
    parts, begin = [], 0
    for found in names.finditer(text):
        parts.append(text[begin : found.start() + 1])
        begin = found.start() + 1
    return [*parts, text[begin:]]


def _plain(name: bytes) -> bytes:
    """Return the bytes that a token of SentencePiece stands for."""
    match = _BYTE.fullmatch(name)
    return bytes([int(match[1], 16)]) if match else name.replace(_SPACE, b" ")
