"""Stepper over plain ONNX Runtime: rows of a shared key-value cache and GroupQueryAttention.

Each layer's cache is one buffer [rows, heads, length, head size]. A step binds a range of its rows as past and as
present, so that the graph writes in place: prefill binds one row, decode the first ones, whose lengths may differ. The
same code runs on CUDA, where the buffers are in the device's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from remora.api.backends import HOST, Memory
from remora.errors import ConfigError
from remora_llm.backends.onnx.folder import DecoderFolder
from remora_llm.generation import Extension, Logits, StepResult
from remora_llm.generation.tasks import ModelFacts

_TYPES: dict[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}


class CacheSize(NamedTuple):
    """Size of the key-value cache."""

    rows: int
    length: int

    def nbytes(self, folder: DecoderFolder, itemsize: int) -> int:
        """Return the memory of all rows in bytes."""
        return self.rows * self.length * token_bytes(folder, itemsize)


def token_bytes(folder: DecoderFolder, itemsize: int) -> int:
    """Return the memory of one token in the cache in bytes."""
    return 2 * folder.layers * folder.kv_heads * folder.head_size * itemsize


def cache_type(session: Any, folder: DecoderFolder, name: str) -> np.dtype[Any]:
    """Return the element type of the cache, after checking the graph's names.

    Raises:
        ConfigError: the graph lacks a tensor that the folder describes, or has another shape or type.
    """
    inputs = {each.name: each for each in session.get_inputs()}
    outputs = {each.name for each in session.get_outputs()}
    needed = [folder.input_names["input_ids"], folder.input_names["attention_mask"], *folder.past]
    missing = [each for each in needed if each not in inputs]
    missing += [each for each in (folder.logits, *folder.present) if each not in outputs]
    if missing:
        raise ConfigError(f"model '{name}': its graph has no tensor '{missing[0]}', which genai_config.json names")
    known = {*needed, folder.input_names["position_ids"]}
    other = sorted(set(inputs) - known)
    if other:
        raise ConfigError(f"model '{name}': its graph has an input '{other[0]}' that is not supported")
    past = inputs[folder.past[0]]
    sizes = zip(list(past.shape)[1::2], (folder.kv_heads, folder.head_size), strict=True)
    if any(isinstance(there, int) and there != here for there, here in sizes):  # the exporter names some dims
        raise ConfigError(
            f"model '{name}': the cache of its graph has the shape {list(past.shape)}, genai_config.json has "
            f"{folder.kv_heads} heads of {folder.head_size}"
        )
    if past.type not in _TYPES:
        raise ConfigError(f"model '{name}': its cache is {past.type}; tensor(float) and tensor(float16) are supported")
    return _TYPES[past.type]


class OnnxStepper:
    """`Stepper` over a session of ONNX Runtime.

    Args:
        session: of a decoder's graph, on the device of ``memory``.
        folder: its description.
        size: of the cache.
        widest: maximum number of positions whose logits a run computes.
        facts: of the model.
        memory: of the device; for the CPU, main memory.
        dtype: element type of the cache, from `cache_type`.
    """

    decode_first = True

    def __init__(
        self,
        session: Any,
        folder: DecoderFolder,
        size: CacheSize,
        widest: int,
        facts: ModelFacts,
        memory: Memory,
        dtype: np.dtype[Any],
    ) -> None:
        self.facts = facts
        self.rows = size.rows
        self.length = size.length
        self._session: Any = session
        self._folder = folder
        self._cache = _Cache(folder, size, memory, dtype)
        inputs = {each.name for each in session.get_inputs()}
        self._has_positions = folder.input_names["position_ids"] in inputs
        logits_type = next(each.type for each in session.get_outputs() if each.name == folder.logits)
        self._logits_type = _TYPES[logits_type]
        self._logits = np.empty(max(widest, size.rows) * folder.vocabulary, self._logits_type)
        """Output of a run; allocated once, because fresh pages would cost more than the copy of a row."""

    def step(self, extensions: Sequence[Extension]) -> StepResult:
        """Append tokens to rows and return the logits.

        Prompts run one by one, then all decode steps in one run."""
        results: list[Logits] = [np.empty((0, self._folder.vocabulary), np.float32)] * len(extensions)
        decoding: list[int] = []
        for place, extension in enumerate(extensions):
            if len(extension.tokens) == 1 and extension.start:
                decoding.append(place)
                continue
            logits = self._extend(extension)
            if extension.wanted:
                results[place] = logits[len(extension.tokens) - extension.wanted :].astype(np.float32)
        if decoding:
            logits = self._decode([extensions[place] for place in decoding])
            for index, place in enumerate(decoding):
                if extensions[place].wanted:
                    results[place] = logits[index : index + 1]
        return StepResult(results)

    def _extend(self, extension: Extension) -> npt.NDArray[Any]:
        row, start, tokens, _ = extension
        end = start + len(tokens)
        ids = np.asarray(tokens, np.int64).reshape(1, -1)
        positions = np.arange(start, end, dtype=np.int64).reshape(1, -1)
        return self._run(ids, np.ones((1, end), np.int64), positions, row)

    def _decode(self, extensions: Sequence[Extension]) -> Logits:
        """Append one token to each of the first rows."""
        ordered = sorted(range(len(extensions)), key=lambda place: extensions[place].row)
        starts = np.array([extensions[place].start for place in ordered], np.int64)
        ids = np.array([[extensions[place].tokens[0]] for place in ordered], np.int64)
        mask = (np.arange(int(starts.max()) + 1) <= starts[:, None]).astype(np.int64)
        logits = self._run(ids, mask, starts[:, None].copy(), 0).astype(np.float32, copy=False)
        if ordered == sorted(ordered):
            return logits
        return logits[np.argsort(ordered)]

    def _run(
        self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], first: int
    ) -> npt.NDArray[Any]:
        """Run the graph on the rows from ``first`` on; the result is valid until the next run."""
        folder, names = self._folder, self._folder.input_names
        rows, width = ids.shape
        binding = self._session.io_binding()
        binding.bind_cpu_input(names["input_ids"], ids)
        binding.bind_cpu_input(names["attention_mask"], mask)
        if self._has_positions:
            binding.bind_cpu_input(names["position_ids"], positions)
        shape = (rows, folder.kv_heads, self.length, folder.head_size)
        cache = self._cache
        kind, number = cache.device
        offset = first * cache.row_bytes
        for past, present, buffer in zip(folder.past, folder.present, cache.buffers, strict=True):
            address = buffer.address + offset
            binding.bind_input(past, kind, number, cache.dtype, shape, address)
            binding.bind_output(present, kind, number, cache.dtype, shape, address)
        count = rows * width * folder.vocabulary
        out = self._logits if count <= self._logits.size else np.empty(count, self._logits_type)
        logits_shape = (rows, width, folder.vocabulary)
        binding.bind_output(folder.logits, "cpu", 0, self._logits_type, logits_shape, out.ctypes.data)
        self._session.run_with_iobinding(binding)
        return out[:count].reshape(rows * width, folder.vocabulary)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a row to another row, head by head."""
        self._cache.copy_row(source, target, tokens)

    def close(self) -> None:
        """Release session and cache."""
        self._cache.buffers.clear()
        self._session = None


class _Cache:
    """Keys and values of all layers on a device, one buffer each."""

    def __init__(self, folder: DecoderFolder, size: CacheSize, memory: Memory, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.device = ("cpu", 0) if memory.device == HOST else ("cuda", memory.device[1])
        self._heads = folder.kv_heads
        self._token_bytes = folder.head_size * dtype.itemsize
        self._head_bytes = size.length * self._token_bytes
        self.row_bytes = folder.kv_heads * self._head_bytes
        self.buffers = [_Buffer(memory, size.rows * self.row_bytes) for _ in folder.past]

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a row to another row, head by head."""
        for buffer in self.buffers:
            for head in range(self._heads):
                at = head * self._head_bytes
                buffer.copy(source * self.row_bytes + at, target * self.row_bytes + at, tokens * self._token_bytes)


class _Buffer:
    """Memory of one layer's keys or values, zero at first.

    Kernels may multiply the values of masked positions with zero, which leaves a NaN as it is. In main memory, pages
    are taken when they are first used."""

    __slots__ = ("_memory", "_owner", "address")

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self._memory: Memory | None = None
        self._owner: object
        if memory.device == HOST:
            array = np.zeros(nbytes, np.uint8)
            self._owner, self.address = array, array.ctypes.data
        else:
            block = memory.take(nbytes)
            memory.clear(block.address, nbytes)
            self._memory, self._owner, self.address = memory, block.owner, block.address

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes between offsets."""
        if self._memory is None:
            ctypes.memmove(self.address + target, self.address + source, nbytes)
        else:
            self._memory.copy(self.address + target, self.address + source, nbytes)
