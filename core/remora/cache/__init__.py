"""Answers kept for requests that come again: the key they are found by, and the cache in this process's memory.

Laws: two requests share a key only if the model must answer them alike; what is kept never changes, whoever reads it;
the cache never holds more bytes than it was given ([K01, K02]; docs/decisions/0008-cache-key.md).
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from remora.messages import Array, Parameter, Request, Response, Tensor

KEY_BYTES = 32
"""Long enough that nobody can make two requests that share a key."""

ENTRY_BYTES = 384
"""What an entry takes besides its values: key, links, tuples. Rounded up from what was measured."""

TENSOR_BYTES = 256
"""What a tensor takes besides its values: the array, its shape, the names."""


class CacheStats(NamedTuple):
    """A snapshot of a cache [P07]. ``util`` is the part of its bytes in use, 0 to 1; durations are sums.

    NaN is what a cache does not know of itself.
    """

    util: float
    entries: float
    hits: int
    misses: int
    evictions: int
    lookup_ns: int
    insertion_ns: int

    @property
    def lookups(self) -> int:
        """How often it was asked."""
        return self.hits + self.misses


class ResponseCache(Protocol):
    """Where answers are kept; one for all models of an engine. Thread-safe; nothing here raises.

    ``remote``: it may have to be waited for, and other servers share it.
    """

    remote: bool

    def run(self, work: Callable[[], None]) -> None:
        """Do work that may wait for the cache where nobody minds."""

    def close(self) -> None:
        """Give everything back, when no model uses it any more."""

    def lookup(self, key: bytes) -> Response | None:
        """The answer kept under a key, as a Response of the caller's own over arrays that nobody can write to."""

    def insert(self, key: bytes, response: Response) -> None:
        """Keep a copy of an answer, unless it is kept already, does not fit, or is nothing that can be copied."""

    def scope(self, model: str, version: int, fingerprint: bytes = b"") -> bytes:
        """What sets the keys of one load of a model apart from all others', those of its former loads included.

        ``fingerprint`` tells apart models of one name and version where the cache outlives them.
        """

    def models_changed(self) -> None:
        """A model was taken out or replaced: from here on `epoch` is another one."""

    @property
    def epoch(self) -> int:
        """Part of the keys of models whose answers other models make [E09]."""

    def stats(self) -> CacheStats:
        """What the cache has done and holds."""


def request_key(scope: bytes, request: Request) -> bytes | None:
    """The key of a request: its model, its inputs by name with dtype, shape and bytes, and the outputs it asks for.

    Args:
        scope: from `ResponseCache.scope`.
        request: checked. Its id, parameters, priority and timeout are no part of the key [K02].

    Returns KEY_BYTES bytes, or None when the request has values that cannot be read as bytes.
    """
    arrays = sorted(request.inputs.items())
    if not all(isinstance(array, np.ndarray) for _, array in arrays):
        return None  # on a device
    # Every piece says how long it is or follows from what came before, so that no two requests hash the same bytes.
    head = repr((scope, request.requested, [(name, array.dtype.str, array.shape) for name, array in arrays])).encode()
    digest = blake2b(len(head).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(head)
    for _, array in arrays:
        if not array.dtype.hasobject:
            if array.size:
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            continue
        for element in array.flat:
            if type(element) is not bytes:
                return None
            digest.update(len(element).to_bytes(8, "little"))
            digest.update(element)
    return digest.digest()


class _Entry(NamedTuple):
    outputs: tuple[Tensor, ...]
    parameters: dict[str, Parameter]
    cost: int


class LocalCache:
    """Answers in this process's memory; those not used for the longest time go first.

    Args:
        size: the most bytes it holds; what entries take besides their values is counted.
        now: nanoseconds of the engine's monotonic clock.
    """

    remote = False

    def __init__(self, size: int, now: Callable[[], int]) -> None:
        self._size = size
        self._now = now
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._used = 0
        self._hits = self._misses = self._evictions = 0
        self._lookup_ns = self._insertion_ns = 0
        self._loads = count()
        self._epochs = count(1)
        self._epoch = 0

    def lookup(self, key: bytes) -> Response | None:
        """See `ResponseCache`."""
        begin_ns = self._now()
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
            else:
                self._hits += 1
                self._entries.move_to_end(key)
            self._lookup_ns += self._now() - begin_ns
        if entry is None:
            return None
        # Views, so that nobody gets hold of the one array whose write flag could be set again.
        outputs = [tensor._replace(data=tensor.data.view()) for tensor in entry.outputs]
        return Response(outputs, dict(entry.parameters))

    def insert(self, key: bytes, response: Response) -> None:
        """See `ResponseCache`."""
        begin_ns = self._now()
        cost = cost_of(response)
        if cost is None or cost > self._size or not self._reserve(key, cost):
            return
        entry = None
        try:
            outputs = tuple(tensor._replace(data=_frozen(tensor.data)) for tensor in response.outputs)
            entry = _Entry(outputs, dict(response.parameters), cost)
        except MemoryError:  # the answer itself is there; it is only not kept
            return
        finally:
            with self._lock:
                if entry is None or key in self._entries:  # another miss of the same request was faster
                    self._used -= cost
                else:
                    self._entries[key] = entry
                self._insertion_ns += self._now() - begin_ns

    def _reserve(self, key: bytes, cost: int) -> bool:
        """Make room before memory is taken; False when there is none or the key is kept already."""
        with self._lock:
            if key in self._entries:
                return False
            while self._used + cost > self._size and self._entries:
                _, gone = self._entries.popitem(last=False)
                self._used -= gone.cost
                self._evictions += 1
            if self._used + cost > self._size:  # all of it reserved by answers that are being copied now
                return False
            self._used += cost
            return True

    def scope(self, model: str, version: int, fingerprint: bytes = b"") -> bytes:
        """See `ResponseCache`."""
        return repr((model, version, next(self._loads))).encode()

    def run(self, work: Callable[[], None]) -> None:
        """See `ResponseCache`: there is nothing to wait for."""
        work()

    def close(self) -> None:
        """See `ResponseCache`."""

    def models_changed(self) -> None:
        """See `ResponseCache`."""
        self._epoch = next(self._epochs)

    @property
    def epoch(self) -> int:
        """See `ResponseCache`."""
        return self._epoch

    def stats(self) -> CacheStats:
        """See `ResponseCache`."""
        with self._lock:
            return CacheStats(
                self._used / self._size if self._size else 0.0,
                len(self._entries),
                self._hits,
                self._misses,
                self._evictions,
                self._lookup_ns,
                self._insertion_ns,
            )


def cost_of(response: Response) -> int | None:
    """The bytes that keeping an answer takes; None for one that cannot be kept: on a device, or objects in it."""
    cost = ENTRY_BYTES
    for tensor in response.outputs:
        if not isinstance(tensor.data, np.ndarray):
            return None
        cost += TENSOR_BYTES + tensor.data.nbytes
        if tensor.data.dtype.hasobject:
            for element in tensor.data.flat:
                if type(element) is not bytes and type(element) is not str:
                    return None
                cost += sys.getsizeof(element)
    return cost + sum(sys.getsizeof(key) + sys.getsizeof(value) for key, value in response.parameters.items())


def _frozen(array: Array) -> Array:
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy
