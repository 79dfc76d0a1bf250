"""Response cache: request keys, the cache protocol and the in-memory cache [K01, K02].

Invariants (docs/decisions/0008-cache-key.md):

1. Two requests share a key only if the model must answer them alike.
2. A stored response never changes.
3. The cache never holds more bytes than its size.
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
"""Long enough that finding two requests with the same key is infeasible."""

ENTRY_BYTES = 384
"""Overhead of an entry besides its values: key, links, tuples. Rounded up from a measurement."""

TENSOR_BYTES = 256
"""Overhead of a tensor besides its values: the array, its shape, the names."""


class CacheStats(NamedTuple):
    """A snapshot of a cache [P07].

    ``util`` is the fraction of its bytes in use, 0 to 1. Durations are sums. NaN marks values that the cache does not
    know.
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
        """Number of look-ups."""
        return self.hits + self.misses


class ResponseCache(Protocol):
    """Response cache of all models of an engine. Thread-safe. No method raises.

    ``remote``: look-ups may block, and other servers share the cache.
    """

    remote: bool

    def run(self, work: Callable[[], None]) -> None:
        """Run work that may block on the cache, in a thread where blocking is allowed."""

    def close(self) -> None:
        """Release all resources, when no model uses the cache any more."""

    def lookup(self, key: bytes) -> Response | None:
        """Return the stored response, or None.

        The Response is the caller's, its arrays are read-only.
        """

    def insert(self, key: bytes, response: Response) -> None:
        """Store a copy of a response unless it is stored already, too large or cannot be copied."""

    def scope(self, model: str, version: int, fingerprint: bytes = b"") -> bytes:
        """Return a key prefix that is unique to one load of a model.

        ``fingerprint`` distinguishes models of one name and version if the cache outlives them.
        """

    def models_changed(self) -> None:
        """Change `epoch`, because requests may get another version of a model than before."""

    @property
    def epoch(self) -> int:
        """Part of the keys of models whose responses other models compute [E09]."""

    def stats(self) -> CacheStats:
        """Return the statistics of the cache."""


def request_key(scope: bytes, request: Request) -> bytes | None:
    """Return the cache key of a request, KEY_BYTES long.

    It covers the model, the inputs by name with dtype, shape and bytes, and the requested outputs.

    Args:
        scope: from `ResponseCache.scope`.
        request: checked. Its id, parameters, priority and timeout are not part of the key [K02].

    Returns None if the request has values that cannot be read as bytes.
    """
    arrays = sorted(request.inputs.items())
    if not all(isinstance(array, np.ndarray) for _, array in arrays):
        return None  # on a device
    # Each part has its length as a prefix or a length that follows from earlier parts, so the encoding is unambiguous.
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


class CacheCounts:
    """Look-ups and insertions of a cache so far; the cache's lock guards them."""

    __slots__ = ("hits", "insertion_ns", "lookup_ns", "misses")

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.lookup_ns = 0
        self.insertion_ns = 0

    def add_lookup(self, spent_ns: int, *, hit: bool) -> None:
        """Count a look-up."""
        self.hits += hit
        self.misses += not hit
        self.lookup_ns += spent_ns


class _Entry(NamedTuple):
    outputs: tuple[Tensor, ...]
    parameters: dict[str, Parameter]
    cost: int


class LocalCache:
    """Response cache in this process's memory with LRU eviction.

    Args:
        size: maximum number of bytes, including the overhead of entries.
        now: nanoseconds of the engine's monotonic clock.
    """

    remote = False

    def __init__(self, size: int, now: Callable[[], int]) -> None:
        self._size = size
        self._now = now
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._used = 0
        self._evictions = 0
        self._counts = CacheCounts()
        self._loads = count()
        self._epochs = count(1)
        self._epoch = 0

    def lookup(self, key: bytes) -> Response | None:
        begin_ns = self._now()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            self._counts.add_lookup(self._now() - begin_ns, hit=entry is not None)
        if entry is None:
            return None
        # Views, because the write flag of the owning array could be set again.
        outputs = [tensor._replace(data=tensor.data.view()) for tensor in entry.outputs]
        return Response(outputs, dict(entry.parameters))

    def insert(self, key: bytes, response: Response) -> None:
        begin_ns = self._now()
        cost = cost_of(response)
        if cost is None or cost > self._size or not self._reserve(key, cost):
            return
        entry = None
        try:
            outputs = tuple(tensor._replace(data=_frozen(tensor.data)) for tensor in response.outputs)
            entry = _Entry(outputs, dict(response.parameters), cost)
        except MemoryError:  # the response is delivered but not stored
            return
        finally:
            with self._lock:
                if entry is None or key in self._entries:  # a concurrent miss of the same request was faster
                    self._used -= cost
                else:
                    self._entries[key] = entry
                self._counts.insertion_ns += self._now() - begin_ns

    def _reserve(self, key: bytes, cost: int) -> bool:
        """Evict entries to make room before memory is allocated.

        Returns False if there is no room or the key is stored already.
        """
        with self._lock:
            if key in self._entries:
                return False
            while self._used + cost > self._size and self._entries:
                _, evicted = self._entries.popitem(last=False)
                self._used -= evicted.cost
                self._evictions += 1
            if self._used + cost > self._size:  # the rest is reserved by responses that are being copied
                return False
            self._used += cost
            return True

    def scope(self, model: str, version: int, fingerprint: bytes = b"") -> bytes:
        return repr((model, version, next(self._loads))).encode()

    def run(self, work: Callable[[], None]) -> None:
        """Run the work at once, because nothing blocks. See `ResponseCache`."""
        work()

    def close(self) -> None:
        """See `ResponseCache`."""

    def models_changed(self) -> None:
        self._epoch = next(self._epochs)

    @property
    def epoch(self) -> int:
        return self._epoch

    def stats(self) -> CacheStats:
        with self._lock:
            counts = self._counts
            return CacheStats(
                self._used / self._size if self._size else 0.0,
                len(self._entries),
                counts.hits,
                counts.misses,
                self._evictions,
                counts.lookup_ns,
                counts.insertion_ns,
            )


def cost_of(response: Response) -> int | None:
    """Return the bytes that storing a response takes, or None if it cannot be stored.

    Device arrays and objects other than strings cannot be stored.
    """
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
