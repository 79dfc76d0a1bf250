"""Tests of ``remora_llm.generation.tokenizing``."""

from __future__ import annotations

import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import ConfigError
from remora_llm.generation.tasks import ParameterError
from remora_llm.generation.tokenizing import (
    ByteDetokenizer,
    TokenizerFile,
    WindowDetokenizer,
    read_tokenizer,
    refuse_long,
)

tokenizers: Any = pytest.importorskip("tokenizers")
TEXTS = ["The quick brown fox jumps over the lazy dog. " * 3, "Größe 寿司 🦊 naïve café " * 4]


@cache
def byte_level() -> TokenizerFile:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return TokenizerFile(tokenizer.to_str(), "m")


@cache
def sentence_piece() -> TokenizerFile:
    """A vocabulary as Llama 2 has it: words with U+2581, bytes for everything else."""
    words = ["\u2581Hello", "\u2581world", "\u2581", "a", "b", "!"]
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocabulary |= {word: 257 + place for place, word in enumerate(words)}
    parts = ["Replace", "ByteFallback", "Fuse", "Strip"]
    details: dict[str, dict[str, Any]] = {
        "Replace": {"pattern": {"String": "\u2581"}, "content": " "},
        "Strip": {"content": " ", "start": 1, "stop": 0},
    }
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Prepend", "prepend": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": part, **details.get(part, {})} for part in parts]},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    return TokenizerFile(json.dumps(document), "m")


def shown(tokens: list[int], detokenizer: ByteDetokenizer | WindowDetokenizer) -> list[str]:
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@given(st.text(max_size=40))
def test_text_survives_tokens_and_back(text: str) -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(tokens) == text
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()


@given(st.lists(st.integers(0, 399), max_size=30))
def test_released_texts_join_to_the_whole_and_are_what_the_library_decodes(tokens: list[int]) -> None:
    tokenizer = byte_level()
    tokens = [token for token in tokens if token < tokenizer.vocabulary]
    whole = tokenizer._parsing.decode(tokens, skip_special_tokens=True)
    parts = shown(tokens, tokenizer.detokenizer())
    assert "".join(parts) == whole == tokenizer.decode(tokens)


def test_a_character_is_never_split() -> None:
    tokenizer = byte_level()
    tokens = [token for byte in "\U0001f98a!".encode() for token in [tokenizer._parsing.token_to_id(_letter(byte))]]
    assert shown(tokens, tokenizer.detokenizer()) == ["", "", "", "\U0001f98a", "!", ""]
    assert shown(tokens[:3], tokenizer.detokenizer()) == ["", "", "", "\ufffd"]


def _letter(byte: int) -> str:
    from remora_llm.generation.tokenizing import byte_letters

    return byte_letters()[byte]


@given(st.lists(st.integers(1, 262), max_size=20))
def test_a_vocabulary_with_neighbours_gives_the_same_text_in_parts(tokens: list[int]) -> None:
    tokenizer = sentence_piece()
    parts = shown(tokens, tokenizer.detokenizer())
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    assert "".join(parts) == tokenizer.decode(tokens)


def test_words_of_a_vocabulary_with_neighbours_keep_their_blanks() -> None:
    assert shown([257, 258, 262], sentence_piece().detokenizer()) == ["Hello", " world", "!", ""]
    assert sentence_piece().token_bytes(257) == b" Hello"
    assert sentence_piece().token_bytes(1 + 0xF0) == b"\xf0"


def test_special_tokens_become_control_tokens_only_if_they_are_parsed() -> None:
    tokenizer = byte_level()
    (number,) = tokenizer.encode("<|end|>")
    assert number in tokenizer.special
    typed = tokenizer.encode("<|end|>", parse_special=False)
    assert number not in typed
    assert tokenizer.decode(typed) == "<|end|>"
    assert tokenizer.decode([number]) == ""
    assert tokenizer.decode([number], skip_special=False) == "<|end|>"
    assert shown([number], tokenizer.detokenizer(skip_special=False)) == ["<|end|>", ""]


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ParameterError, match="token id 5000"):
        byte_level().decode([5000])
    with pytest.raises(ParameterError, match="token id -1"):
        byte_level().decode([-1])


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ParameterError, match="surrogate"):
        byte_level().encode("\ud800")


def test_a_file_that_is_not_a_tokenizer_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        read_tokenizer(path, "m")
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"model 'm': its tokenizer\.json cannot be read"):
        read_tokenizer(path, "m")


@pytest.mark.parametrize("make", [byte_level, sentence_piece], ids=["byte-level", "sentence-piece"])
def test_a_text_that_cannot_fit_is_refused_and_one_that_may_is_read(make: Any) -> None:
    made = make()
    with pytest.raises(ParameterError, match="20 tokens, which are possible here, have at most"):
        made.encode("a" * (20 * made.longest + 1), most=20)
    text = "Hello world! " * 20
    assert made.encode(text, most=1000) == made.encode(text)


def test_a_long_text_is_counted_in_parts_only_until_it_cannot_fit() -> None:
    counted: list[str] = []

    def count(part: str) -> int:
        counted.append(part)
        return len(part)

    with pytest.raises(ParameterError, match="more than 2000 tokens; at most 1000"):
        refuse_long("word " * 1_000_000, 1000, 10_000, count)
    assert len(counted) == 1
    assert len(counted[0]) <= 1 << 15
    counted.clear()
    text = "word " * 100_000
    refuse_long(text, 400_000, 10_000, count)
    assert counted == []
    refuse_long(text, 60_000, 10_000, lambda part: count(part) // 5)
    assert "".join(counted) == text


@pytest.mark.parametrize("of", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_converted(of: str) -> None:
    made = sentence_piece() if of == "decode" else byte_level()
    tokens = [259, 260] * 500_000
    begun, done = threading.Event(), threading.Event()

    def convert() -> None:
        begun.set()
        if of == "encode":
            made._parsing.encode_batch_fast(["a" * (1 << 20)])
        else:
            made._parsing.decode_batch([tokens])
        done.set()

    thread = threading.Thread(target=convert)
    thread.start()
    assert begun.wait(30)
    turns = 0
    while not done.is_set():
        turns += 1
    thread.join()
    assert turns > 1000
