"""Judgement of measurements that were taken in pairs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def verdict(ratios: Sequence[float]) -> int:
    """Return 1 if the first of each pair is faster, -1 if the second is, 0 for a tie.

    The median of the ratios must differ from 1 by more than 2 % and by more than their median deviation.
    """
    logs = [math.log(max(ratio, 1e-9)) if ratio < math.inf else 20.0 for ratio in ratios]
    middle = median(logs)
    spread = median(abs(each - middle) for each in logs)
    if abs(middle) <= max(0.02, 1.5 * spread):
        return 0
    return 1 if middle > 0 else -1
