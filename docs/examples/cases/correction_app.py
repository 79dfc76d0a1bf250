"""Correction of spelling as a model: the nearest known word within two edits, the most frequent of equally near ones.

    remora serve docs/examples/cases/correction_app.py

The words and their frequencies are those of this documentation.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import remora

DOCS = Path(__file__).resolve().parents[2]
MOST_EDITS = 2
WORD = re.compile(r"[a-z]{2,}")


def known_words() -> Counter[str]:
    """Return the words that occur at least twice, with their number."""
    found = Counter(WORD.findall(" ".join(path.read_text().lower() for path in sorted(DOCS.glob("*.md")))))
    return Counter({word: count for word, count in found.items() if count > 1})


def shortened(word: str, letters: int) -> Iterator[str]:
    """Yield the word without up to ``letters`` letters, each result once."""
    seen, last = {word}, {word}
    yield word
    for _ in range(letters):
        last = {each[:at] + each[at + 1 :] for each in last for at in range(len(each))} - seen
        seen |= last
        yield from last


def distance(left: str, right: str) -> int:
    """Return the number of edits between two words: a letter inserted, removed, replaced, or swapped with the next."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        above, before, row = before, row, [i]
        for j, b in enumerate(right, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                row[-1] = min(row[-1], above[j - 2] + 1)
    return row[-1]


@remora.model(batch=16, max_delay="2ms")
class Corrector:
    """Texts in, corrected texts out."""

    def setup(self, device: str) -> None:
        """Index each known word under all its shortened forms, so that a look-up needs no list of all edits."""
        self.words = known_words()
        self.index: dict[str, list[str]] = defaultdict(list)
        for word in self.words:
            for form in shortened(word, MOST_EDITS):
                self.index[form].append(word)

    def predict(self, text: list[str]) -> list[str]:
        """Return the texts with each unknown word replaced."""
        return [WORD.sub(lambda found: self.corrected(found[0]), each) for each in text]

    def corrected(self, word: str) -> str:
        """Return the nearest known word, or the word itself if none is near."""
        if word in self.words:
            return word
        near = {each for form in shortened(word, MOST_EDITS) for each in self.index.get(form, ())}
        ranked = sorted((distance(word, each), -self.words[each], each) for each in near)
        return ranked[0][2] if ranked and ranked[0][0] <= MOST_EDITS else word
