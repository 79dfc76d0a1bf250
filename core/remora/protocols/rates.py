"""Token buckets, which limit how often something may happen. Pure: time is an argument."""

from __future__ import annotations

from ipaddress import IPv6Address

_SWEEP_S = 1.0
"""Shortest interval of searches for full buckets, because a search visits each bucket."""
_NETWORK_BITS = 64
"""Bits of an IPv6 address that a network assigns to its hosts (RFC 4291 2.5.1): one client may have them all."""


class TokenBucket:
    """Bucket that holds at most ``burst`` tokens and gains ``rate`` tokens a second.

    It is full at first. Times are in seconds and never decrease.
    """

    __slots__ = ("_at", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until a token is available, 0 if one is."""
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self.rate

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until one is available."""
        wait_s = self.wait_s(now)
        if not wait_s:
            self._tokens -= 1
        return wait_s

    def is_full(self, now: float) -> bool:
        """Return True if all tokens are there, so that a new bucket would behave the same."""
        self.wait_s(now)
        return self._tokens >= self.burst


class PeerBudget:
    """Token bucket for each peer, for a bounded number of peers.

    IPv6 addresses of a /64 network are one peer. When there are too many peers, full buckets are evicted, at most once
    a second, then the oldest one.
    """

    def __init__(self, rate: float, burst: float, most_peers: int = 4096) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most_peers
        self._buckets: dict[str, TokenBucket] = {}
        self._swept_at = float("-inf")

    def __len__(self) -> int:
        return len(self._buckets)

    def __contains__(self, peer: str) -> bool:
        return _counted_as(peer) in self._buckets

    def wait_s(self, peer: str, now: float) -> float:
        """Return the seconds until the peer has a token, 0 if it has one."""
        bucket = self._buckets.get(_counted_as(peer))
        return 0.0 if bucket is None else bucket.wait_s(now)

    def take(self, peer: str, now: float) -> float:
        """Take a token of the peer; see `TokenBucket.take`."""
        peer = _counted_as(peer)
        bucket = self._buckets.get(peer)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[peer] = TokenBucket(self._rate, self._burst, now)
        return bucket.take(now)

    def _make_room(self, now: float) -> None:
        if len(self._buckets) < self._most:
            return
        if now >= self._swept_at + _SWEEP_S:
            self._swept_at = now
            for peer in [peer for peer, bucket in self._buckets.items() if bucket.is_full(now)]:
                del self._buckets[peer]
        if len(self._buckets) >= self._most:
            del self._buckets[next(iter(self._buckets))]


def _counted_as(peer: str) -> str:
    """Return the name of a peer's bucket.

    It is the /64 network of an IPv6 address, and the IPv4 address of a mapped one.
    """
    if ":" not in peer:
        return peer
    try:
        address = IPv6Address(peer)
    except ValueError:
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> _NETWORK_BITS << _NETWORK_BITS)}/{_NETWORK_BITS}"
