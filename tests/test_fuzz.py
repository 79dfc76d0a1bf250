"""Fuzzers: their corpora are valid inputs, a seed repeats its inputs, and a failure is found, made small and kept."""

from __future__ import annotations

import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

sys.path.insert(0, str(Path(__file__).resolve().parent / "fuzz"))
from fuzzing import failure_of, fuzz, main
from mutation import Mutator
from targets import TARGETS, Target


class Fragile(Target):
    """A reader that fails for one word."""

    words = (b"needle",)

    def corpus(self) -> list[bytes]:
        return [b"a longer text that has no meaning", b"another text"]

    def check(self, data: bytes) -> None:
        if b"needle" in data:
            raise KeyError("needle")


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_a_fixed_seed_fails(name: str, tmp_path: Path) -> None:
    with closing(TARGETS[name]()) as target:
        assert fuzz(name, target, 7, lambda count: count < 150, tmp_path) == 150


def test_a_seed_repeats_its_inputs_and_another_has_others() -> None:
    def made(seed: int) -> list[bytes]:
        return list(islice(Mutator([b"abc", b"0123456789"], [b"x"], seed).inputs(), 200))

    assert made(1) == made(1) != made(2)


def test_a_failing_input_is_made_small_kept_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    count = fuzz("fragile", Fragile(), 1, lambda count: count < 10_000, tmp_path, said.append)
    assert count < 0
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == b"needle"
    assert "KeyError: 'needle'" in said[0]
    assert str(kept) in said[1]
    monkeypatch.setitem(TARGETS, "fragile", Fragile)
    assert main(["fragile", "--repeat", str(kept)]) == 1


def test_an_input_that_takes_long_fails() -> None:
    times = iter((0.0, 3.0))
    assert "3.0 s" in failure_of(Fragile(), b"", lambda: next(times))
