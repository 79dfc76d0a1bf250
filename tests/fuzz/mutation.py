"""Mutation of bytes by a seed: the same seed and corpus give the same inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

MOST_BYTES = 65_536
_NUMBERS = (0, 1, 2, 7, 8, 9, 15, 16, 63, 64, 127, 128, 255, 256, 4_095, 65_535, 65_536, 2**31 - 1, 2**32 - 1, 2**63)


class Mutator:
    """Inputs made of a corpus.

    Args:
        corpus: valid inputs.
        words: pieces that mean something in the format.
        seed: of the random choices.
    """

    def __init__(self, corpus: Sequence[bytes], words: Sequence[bytes], seed: int) -> None:
        self._corpus = list(corpus)
        self._words = list(words) or [b"\0"]
        self._random = random.Random(seed)
        self._steps: tuple[Callable[[bytearray], None], ...] = (
            self._flip, self._set, self._insert, self._remove, self._repeat, self._swap, self._number,
            self._text_number, self._splice,
        )  # fmt: skip

    def inputs(self) -> Iterator[bytes]:
        """Yield the corpus unchanged, then mutated inputs for ever."""
        yield from self._corpus
        while True:
            data = bytearray(self._random.choice(self._corpus))
            for _ in range(self._random.choice((1, 1, 1, 2, 2, 3, 5, 10))):
                self._random.choice(self._steps)(data)
            yield bytes(data[:MOST_BYTES])

    def _at(self, data: bytearray) -> int:
        return self._random.randrange(len(data) + 1)

    def _span(self, data: bytearray) -> tuple[int, int]:
        begin = self._at(data)
        return begin, min(len(data), begin + int(self._random.expovariate(1 / 16)) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] = self._random.choice((0, 255, self._random.randrange(256)))

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self._random.choice(self._words)

    def _remove(self, data: bytearray) -> None:
        begin, end = self._span(data)
        del data[begin:end]

    def _repeat(self, data: bytearray) -> None:
        begin, end = self._span(data)
        data[begin:begin] = data[begin:end] * self._random.choice((1, 2, 10, 100))

    def _swap(self, data: bytearray) -> None:
        begin, end = self._span(data)
        piece = data[begin:end]
        del data[begin:end]
        at = self._at(data)
        data[at:at] = piece

    def _number(self, data: bytearray) -> None:
        size, order = self._random.choice((1, 2, 3, 4, 8)), self._random.choice(("little", "big"))
        at, number = self._at(data), self._random.choice(_NUMBERS) + self._random.choice((-1, 0, 1))
        data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, order)  # type: ignore[arg-type]

    def _text_number(self, data: bytearray) -> None:
        digits = [at for at, byte in enumerate(data[:4_096]) if 48 <= byte <= 57]
        if digits:
            at = self._random.choice(digits)
            data[at : at + 1] = str(self._random.choice(_NUMBERS) * self._random.choice((1, -1))).encode()

    def _splice(self, data: bytearray) -> None:
        other = self._random.choice(self._corpus)
        begin = self._random.randrange(len(other) + 1)
        data[self._at(data) :] = other[begin:]
