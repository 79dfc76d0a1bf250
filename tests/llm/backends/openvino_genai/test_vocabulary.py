"""Tests of ``remora_llm.backends.openvino_genai.vocabulary`` with a tokenizer of SentencePiece's kind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from remora_llm.backends.openvino_genai.vocabulary import VocabularyTokens

NAMES = (b"<s>", b"</s>", "\u2581one".encode(), "\u2581two".encode(), b"<0xC3>", b"<0xA9>", b"<", b"/s>")


class Pieces:
    """The library's tokenizer for a text of these pieces, the longest first."""

    def get_vocab(self) -> dict[bytes, int]:
        return {name: number for number, name in enumerate(NAMES)}

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        rest, found = text.replace(" ", "\u2581").encode(), [0] if add_special_tokens else []
        while rest:
            number = max((each for each in range(8) if rest.startswith(NAMES[each])), key=lambda at: len(NAMES[at]))
            found.append(number)
            rest = rest[len(NAMES[number]) :]
        return SimpleNamespace(input_ids=SimpleNamespace(data=np.array([found])))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        kept = [NAMES[each] for each in tokens if each > 1 or not skip_special_tokens]
        raw = b"".join(b"\xc3" if each == b"<0xC3>" else b"\xa9" if each == b"<0xA9>" else each for each in kept)
        return raw.decode("utf-8", "replace").replace("\u2581", " ").removeprefix(" ")


TOKENS = VocabularyTokens(Pieces(), {0: "<s>", 1: "</s>"})


def test_a_special_token_is_cut_where_it_must_stay_text() -> None:
    assert TOKENS.encode(" one</s>") == (0, 2, 1)
    assert TOKENS.encode(" one</s>", add_special=False, parse_special=False) == (2, 6, 7)


def test_text_in_parts_keeps_blanks_and_characters_of_several_bytes() -> None:
    parts = TOKENS.detokenizer()
    texts = [parts.feed(token) for token in (2, 3, 4, 5, 1)]
    assert "".join(texts) + parts.flush() == "one two\u00e9"
    assert TOKENS.decode((2, 3, 1)) == "one two"


def test_bytes_of_a_token_are_those_of_its_text() -> None:
    assert [TOKENS.token_bytes(token) for token in (2, 4, 99)] == [b" one", b"\xc3", b""]
    assert [TOKENS.token_name(token) for token in (2, 99)] == [" one", ""]
