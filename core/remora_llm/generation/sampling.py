"""Choice of the next token from logits, with a random generator that counts positions. Pure.

The random number of a position depends on seed, choice and position alone, not on earlier draws; an answer that is
interrupted and computed again therefore gets the same tokens.

Order of the operations: bias, penalties (log probabilities are taken here), forbidden tokens and grammar, temperature,
min_p, top_k, top_p. Tokens with equal logits rank by their ids.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from remora.errors import InternalError
from remora_llm.generation.tasks import LEAST_TEMPERATURE, Sampling, Task, TokenLogprob

_Row = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.int64]
_NO_IDS: _Ids = np.empty(0, np.int64)
_SLICE = 256
_CUTS = (1e-3, 1e-6, 0.0)
"""Relative probabilities above which the candidates of a nucleus are searched, in this order."""


class Chosen(NamedTuple):
    """Chosen token, with its log probability if the task requests it."""

    token: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Sampler of one choice of a task.

    Args:
        task: its sampling and limits.
        choice: index of the choice.
        banned: tokens that may not be chosen before ``task.min_tokens``.
    """

    __slots__ = ("_banned", "_choice", "_counts", "_prompt", "_sampling", "_task")

    def __init__(self, task: Task, choice: int, banned: Collection[int] = ()) -> None:
        self._task = task
        self._sampling = task.sampling
        self._choice = choice
        self._banned = np.fromiter(sorted(banned), np.int64) if task.min_tokens and banned else _NO_IDS
        self._counts: dict[int, int] = {}
        repeats = task.sampling.repetition_penalty != 1
        self._prompt: _Ids = np.unique(np.asarray(task.prompt, np.int64)) if repeats else _NO_IDS

    def choose(self, logits: _Row, position: int, allowed: npt.NDArray[np.bool_] | None = None) -> Chosen:
        """Return the token at ``position`` of the answer.

        Args:
            logits: one row; not changed.
            position: number of tokens that the answer has.
            allowed: the tokens that a grammar permits.

        Raises:
            InternalError: the logits contain NaN or infinity, or no token is allowed.
        """
        sampling = self._sampling
        row = self._processed(logits)
        scored = row
        if position < self._task.min_tokens and len(self._banned):
            row = row.copy()
            row[self._banned] = -np.inf
        if allowed is not None:
            row = np.where(allowed, row, np.float32(-np.inf))
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            raise InternalError(
                f"the model's logits at token {position} of the answer are {row[best]}: its weights or its inputs are "
                "outside the range of its numbers",
                from_model=True,
            )
        token = best
        if sampling.temperature >= LEAST_TEMPERATURE:
            token = draw(row, float(row[best]), sampling, random_number(sampling.seed, self._choice, position))
        if self._task.logprobs is None:
            return Chosen(token)
        return Chosen(token, logprob_of(scored, token, self._task.logprobs))

    def accept(self, token: int) -> None:
        """Count a token of the answer."""
        if self._sampling.penalizes:
            self._counts[token] = self._counts.get(token, 0) + 1

    def _processed(self, logits: _Row) -> _Row:
        """Return the logits after bias and penalties."""
        sampling = self._sampling
        if not sampling.logit_bias and not sampling.penalizes:
            return logits
        row = logits.copy()
        for token, addend in sampling.logit_bias:
            row[token] += np.float32(addend)
        if not sampling.penalizes:
            return row
        written: _Ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        if sampling.repetition_penalty != 1:
            seen = np.union1d(self._prompt, written)
            penalty = np.float32(sampling.repetition_penalty)
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if len(written) and (sampling.presence_penalty or sampling.frequency_penalty):
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row[written] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts
        return row


def random_number(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) of a position (Philox, keyed by seed and choice)."""
    generator = np.random.Philox(key=seed | choice << 64, counter=position)
    return float((generator.random_raw() >> 11) * 2.0**-53)


def draw(row: _Row, highest: float, sampling: Sampling, number: float) -> int:
    """Return the token whose share of the truncated distribution contains ``number``.

    Args:
        row: logits; the largest is ``highest``.
        sampling: with a temperature above 0.
        number: in [0, 1).
    """
    temperature = sampling.temperature
    if 0 < sampling.top_k < len(row):
        ids = _largest(row, sampling.top_k)
    elif sampling.min_p > 0:
        ids = np.flatnonzero(row >= _least(highest, sampling))
    else:
        return _draw_from_all(row, highest, sampling, number)
    if sampling.top_k and sampling.min_p > 0:
        ids = ids[row[ids] >= _least(highest, sampling)]
    shares = np.exp((row[ids].astype(np.float64) - highest) / temperature)
    if sampling.top_p < 1:
        kept = _nucleus(shares, sampling.top_p * float(shares.sum()))
        ids, shares = ids[kept], shares[kept]
    return int(ids[_position(np.cumsum(shares), number)])


def _draw_from_all(row: _Row, highest: float, sampling: Sampling, number: float) -> int:
    """Draw without top_k and min_p.

    The sums are taken over slices first, because a cumulative sum of the whole row would be slow.
    """
    shares = np.exp((row - np.float32(highest)) / np.float32(sampling.temperature))
    if sampling.top_p < 1:
        enough = sampling.top_p * float(shares.sum())
        for cut in _CUTS:
            ids = np.flatnonzero(shares >= np.float32(cut))
            if cut == 0 or float(shares[ids].sum()) >= enough:
                break
        few = shares[ids]
        kept = _nucleus(few, enough)
        return int(ids[kept][_position(np.cumsum(few[kept], dtype=np.float64), number)])
    slices = np.add.reduceat(shares, np.arange(0, len(shares), _SLICE)).astype(np.float64)
    sums = np.cumsum(slices)
    place = _position(sums, number)
    first = place * _SLICE
    inner = np.cumsum(shares[first : first + _SLICE], dtype=np.float64)
    left = number * sums[-1] - (sums[place - 1] if place else 0.0)
    return first + _position(inner, min(max(left / inner[-1], 0.0), 1.0))


def logprob_of(row: _Row, token: int, alternatives: int) -> TokenLogprob:
    """Return the log probability of a token and of the likeliest ones."""
    highest = np.float32(row.max())
    # Infinite bans contribute nothing to the sum.
    norm = float(highest) + math.log(float(np.exp(row - highest).sum()))
    rank = int(np.count_nonzero(row > row[token])) + 1
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        top = tuple((int(each), float(row[each]) - norm) for each in _largest(row, alternatives))
    return TokenLogprob(token, float(row[token]) - norm, rank, top)


def prompt_logprobs(logits: Any, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Return the log probability of each token under the logits of the position before it."""
    return [logprob_of(row, token, alternatives) for row, token in zip(logits, tokens, strict=True)]


def _position(sums: npt.NDArray[np.float64], number: float) -> int:
    found = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return min(found, len(sums) - 1)


def _least(highest: float, sampling: Sampling) -> np.float32:
    return np.float32(highest + sampling.temperature * math.log(sampling.min_p))


def _sorted(row: _Row, ids: _Ids) -> _Ids:
    """Return ids by falling logits, equal ones by rising ids."""
    order = np.argsort(-row[ids], kind="stable")  # the ids rise already
    return ids[order]


def _largest(row: _Row, count: int) -> _Ids:
    """Return the ids of the ``count`` largest logits, in order.

    The maxima of slices of the row give a lower bound of the result without sorting the whole row.
    """
    size = len(row)
    count = min(count, size)
    width = size // max(size // max(4 * count, 256), 1)
    if width >= size:
        return _sorted(row, np.arange(size))[:count]
    maxima = row[: size // width * width].reshape(-1, width).max(axis=0)
    bound = np.partition(maxima, width - count)[width - count]
    return _sorted(row, np.flatnonzero(row >= bound))[:count]


def _nucleus(shares: npt.NDArray[Any], enough: float) -> _Ids:
    """Return the places of the fewest largest shares that sum to ``enough``, in rising order.

    Of equal shares the first ones count. Sorting values is much faster than sorting places.
    """
    falling = np.sort(shares)[::-1]
    count = min(int(np.searchsorted(np.cumsum(falling, dtype=np.float64), enough)) + 1, len(falling))
    bound = falling[count - 1]
    larger = np.flatnonzero(shares > bound)
    equal = np.flatnonzero(shares == bound)[: count - len(larger)]
    return np.sort(np.concatenate((larger, equal)))
