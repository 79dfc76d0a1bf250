"""Token buckets, which limit how often something may happen. Pure: time is an argument."""

from __future__ import annotations


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

    When there are too many, full buckets are forgotten, then the oldest one.
    """

    def __init__(self, rate: float, burst: float, most_peers: int = 4096) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most_peers
        self._buckets: dict[str, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, peer: str, now: float) -> float:
        """Return the seconds until the peer has a token, 0 if it has one."""
        bucket = self._buckets.get(peer)
        return 0.0 if bucket is None else bucket.wait_s(now)

    def take(self, peer: str, now: float) -> float:
        """Take a token of the peer; see `TokenBucket.take`."""
        bucket = self._buckets.get(peer)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[peer] = TokenBucket(self._rate, self._burst, now)
        return bucket.take(now)

    def _make_room(self, now: float) -> None:
        if len(self._buckets) < self._most:
            return
        for peer in [peer for peer, bucket in self._buckets.items() if bucket.is_full(now)]:
            del self._buckets[peer]
        if len(self._buckets) >= self._most:
            del self._buckets[next(iter(self._buckets))]
