"""Conversion between text and tokens by a model's ``tokenizer.json``.

Invariant: the texts that a detokenizer releases join to the text of all tokens, and no character is split.
"""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from remora.errors import ConfigError
from remora_llm.generation.tasks import ContextError, ParameterError

_REPLACEMENT = "\ufffd"
UNKNOWN_BYTES = 1 << 10
"""Longest text that one token stands for in vocabularies with a token for unknown words."""
_USUAL_BYTES = 8
"""Bytes of a token that few texts have on average; a longer text is counted in parts before it is read whole."""
_PART_CHARACTERS = 1 << 15


class TokenizerFile:
    """Tokenizer of a ``tokenizer.json``. Any thread may use it.

    Args:
        content: text of the file.
        name: name of the model, for errors.

    Raises:
        ConfigError: the package tokenizers is missing or cannot read the content.
    """

    def __init__(self, content: str, name: str) -> None:
        try:
            library = importlib.import_module("tokenizers")
        except ImportError as error:
            from remora.system.install_advice import install_command

            raise ConfigError(
                f"model '{name}' needs the package tokenizers, which cannot be imported ({error}): "
                f"{install_command('generation')}"
            ) from error
        try:
            self._parsing: Any = library.Tokenizer.from_str(content)
            self._plain: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"model '{name}': its tokenizer.json cannot be read: {error}") from error
        self._plain.encode_special_tokens = True
        for each in (self._parsing, self._plain):
            each.no_truncation()
            each.no_padding()
        self.vocabulary: int = self._parsing.get_vocab_size(with_added_tokens=True)
        added = self._parsing.get_added_tokens_decoder()
        self.special: dict[int, str] = {number: each.content for number, each in added.items() if each.special}
        self._added: dict[int, str] = {number: each.content for number, each in added.items()}
        self._bytes = _byte_table(self._parsing, self._added, json.loads(content))
        self.longest = _longest_token(self._bytes, self._parsing)
        names = (f"<0x{byte:02X}>" for byte in range(256))
        numbers = (self._parsing.token_to_id(name) for name in names)
        self._single = frozenset(number for number in numbers if number is not None)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, most: int = 0
    ) -> tuple[int, ...]:
        """Return the tokens of a text; see `remora_llm.generation.Tokens`.

        Raises:
            ParameterError: the text contains lone surrogates, or has more than ``most`` tokens.
        """
        tokenizer = self._parsing if parse_special else self._plain

        def encoding(part: str) -> Any:
            # of the library's functions one that lets other threads run, and makes no offsets
            return tokenizer.encode_batch_fast([part], add_special_tokens=add_special)[0]

        try:
            if not text.isascii():
                text.encode()  # because tokenizers 0.20 replaces lone surrogates
            if most:
                refuse_long(text, most, self.longest, lambda part: len(encoding(part)))
            return tuple(encoding(text).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise ParameterError("prompt", "the text contains a lone surrogate, which has no UTF-8 form") from error

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens. Raises ParameterError for an id that the vocabulary lacks."""
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise ParameterError("tokens", f"token id {token} is beyond the vocabulary of {self.vocabulary} tokens")
        if self._bytes is not None:
            raw = b"".join(b"" if skip_special and token in self.special else self._bytes[token] for token in tokens)
            return raw.decode("utf-8", "replace")
        text: str = self._parsing.decode_batch([list(tokens)], skip_special_tokens=skip_special)[0]
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; those of its name for a special token."""
        if self._bytes is not None and 0 <= token < len(self._bytes):
            return self._bytes[token]
        name = self._added.get(token) or self._parsing.id_to_token(token) or ""
        if len(name) == 6 and name.startswith("<0x"):  # a byte of SentencePiece's byte fallback
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    def token_name(self, token: int) -> str:
        """Return a token as the vocabulary writes it, "" for an id that it lacks."""
        return self._parsing.id_to_token(token) or ""

    def detokenizer(self, *, skip_special: bool = True) -> ByteDetokenizer | WindowDetokenizer:
        """Return a detokenizer for one answer."""
        skipped = self.special if skip_special else {}
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, skipped)
        return WindowDetokenizer(lambda tokens: self.decode(tokens, skip_special=skip_special), self._single)


def refuse_long(text: str, most: int, longest: int, count: Callable[[str], int]) -> None:
    """Raise ContextError for a text with many more than ``most`` tokens, mostly unread.

    Args:
        text: of any length.
        most: number of tokens beyond which the caller refuses the text.
        longest: bytes of the longest token.
        count: returns the number of tokens of a part of the text.
    """
    if len(text) > most * longest:
        raise ContextError(
            "prompt",
            f"the text has {len(text)} characters; {most} tokens, which are possible here, have at most "
            f"{most * longest} bytes: shorten it",
            most,
            len(text) // longest,
        )
    if len(text) <= max(most * _USUAL_BYTES, _PART_CHARACTERS):
        return
    found = at = 0
    while at < len(text):
        end = at + _PART_CHARACTERS
        blank = text.rfind(" ", at + 1, end) if end < len(text) else -1
        end = blank if blank > 0 else end
        found += count(text[at:end])
        at = end
        if found > 2 * most:  # twice, because cuts may split tokens
            raise ContextError(
                "prompt",
                f"the text has more than {2 * most} tokens; at most {most} are possible here: shorten it",
                most,
                most + 1,
            )


def read_tokenizer(path: Path, name: str) -> TokenizerFile:
    """Return the tokenizer of a file. Raises ConfigError."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model '{name}': {path.name} cannot be read: {error}") from error
    return TokenizerFile(content, name)


class ByteDetokenizer:
    """Detokenizer for vocabularies in which each token is a sequence of bytes.

    Args:
        table: bytes of each token.
        skipped: tokens without text.
    """

    __slots__ = ("_decoder", "_skipped", "_table")

    def __init__(self, table: Sequence[bytes], skipped: object = ()) -> None:
        self._table = table
        self._skipped: Any = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the characters that are complete with this token."""
        if token in self._skipped or token >= len(self._table):
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        """Return what was held back; incomplete characters become U+FFFD."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Detokenizer for vocabularies whose text depends on neighbouring tokens.

    Decodes a window of tokens twice, with and without the new ones; the difference is new text. Nothing is decoded
    amid tokens for single bytes, because a later byte can change the characters of the whole sequence.

    Args:
        decode: returns the text of tokens.
        single: tokens for single bytes.
    """

    __slots__ = ("_decode", "_read", "_single", "_tokens")

    def __init__(self, decode: Callable[[Sequence[int]], str], single: Collection[int] = ()) -> None:
        self._decode = decode
        self._single = single
        self._tokens: list[int] = []
        self._read = 0  # number of tokens whose text has been returned

    def feed(self, token: int) -> str:
        """Return the characters that are complete with this token."""
        self._tokens.append(token)
        if token in self._single:
            return ""
        before = self._decode(self._tokens[: self._read])
        after = self._decode(self._tokens)
        if after.endswith(_REPLACEMENT):
            return ""
        self._tokens = self._tokens[self._read :] if self._read else self._tokens
        self._read = len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """Return what was held back; incomplete characters become U+FFFD."""
        before = self._decode(self._tokens[: self._read])
        after = self._decode(self._tokens)
        self._tokens, self._read = [], 0
        return after[len(before) :]


def _byte_table(tokenizer: Any, added: dict[int, str], document: Any) -> list[bytes] | None:
    """Return the bytes of each token of a byte-level vocabulary, None for other vocabularies."""
    decoder = document.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    if [part.get("type") for part in parts] != ["ByteLevel"]:
        return None
    values = {letter: byte for byte, letter in enumerate(byte_letters())}
    table = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
    for name, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number >= len(table):
            table.extend([b""] * (number + 1 - len(table)))
        if number in added or any(letter not in values for letter in name):
            table[number] = name.encode()
        else:
            table[number] = bytes(values[letter] for letter in name)
    return table


def _longest_token(table: Sequence[bytes] | None, tokenizer: Any) -> int:
    """Return the largest number of bytes of a text that become one token."""
    if table is not None:
        return max(map(len, table), default=1)
    names = tokenizer.get_vocab(with_added_tokens=True)
    return max(UNKNOWN_BYTES, max((len(name.encode()) for name in names), default=1))


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level vocabularies.

    Printable bytes stand for themselves; the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
