"""Text of floats as RapidJSON prints them [H15].

Floats keep their point (``5.0``), use exponents beyond 21 digits or six zeros (``1e-7``), and may be NaN or Infinity.

Invariant: the text has the fewest digits that read back as the same float.
"""

from __future__ import annotations

import math


def number(value: float) -> bytes:
    """Return a float's text with the fewest digits that read back as the same float."""
    if not math.isfinite(value):
        return b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    digits = (whole + fraction).lstrip("0")
    # The decimal point is `point` digits after the first digit of `digits`.
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if not digits:
        text = "0.0"
    elif len(digits) <= point <= 21:
        text = digits + "0" * (point - len(digits)) + ".0"
    elif 0 < point <= 21:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        text = f"{digits[0]}{'.' if len(digits) > 1 else ''}{digits[1:]}e{point - 1}"
    return (sign + text).encode()
