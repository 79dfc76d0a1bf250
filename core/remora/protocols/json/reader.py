"""Reader of JSON text as RapidJSON reads it, with RapidJSON's error texts and offsets.

Clients match on those texts [H13]. The fast path is orjson. It refuses text that Triton accepts (NaN and infinities,
strings that are not UTF-8, a byte order mark, a NUL after the document) and has other error texts, so the small reader
below reads again whatever orjson refuses.

Values are ``dict``, ``list``, ``str``, ``bool``, ``None``, ``int`` (-2**63 to 2**64-1) and ``float``; an integer beyond
that range is a float. Bytes of a string that are not UTF-8 become surrogate escapes.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import orjson

from remora.messages import Buffer
from remora.protocols.json.long_lists import release

EMPTY = "The document is empty."
NOT_SINGULAR = "The document root must not be followed by other values."
INVALID_VALUE = "Invalid value."
MISSING_NAME = "Missing a name for object member."
MISSING_COLON = "Missing a colon after a name of object member."
MISSING_COMMA_IN_OBJECT = "Missing a comma or '}' after an object member."
MISSING_COMMA_IN_ARRAY = "Missing a comma or ']' after an array element."
BAD_HEX = "Incorrect hex digit after \\u escape in string."
BAD_SURROGATE = "The surrogate pair in string is invalid."
BAD_ESCAPE = "Invalid escape character in string."
MISSING_QUOTE = "Missing a closing quotation mark in string."
NUMBER_TOO_BIG = "Number too big to be stored in double."
MISSING_FRACTION = "Miss fraction part in number."
MISSING_EXPONENT = "Miss exponent in number."
TOO_LONG = "Too many values for text with NaN, Infinity or a fault in it; send flat or binary data."

LONG_BYTES = 262_144
"""Size beyond which a text is read in pieces."""
_RUN_BYTES = 262_144
"""Text of simple elements that one call reads."""
MAX_DEPTH = 1024
"""Deepest nesting of a document; orjson's own limit, kept by the reader below too."""

MAX_STEPS = 250_000
"""Largest number of values and escapes that the small reader reads one by one, because it is slow and its input may be
hostile.
"""

_SPACE = re.compile(rb"[ \t\n\r]*")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?P<real>(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*+')
# A run of simple array elements, each with the comma after it, which orjson reads in one call. Simple elements are
# numbers, words, strings without escapes, and arrays of these. All quantifiers are possessive: the pattern never
# backtracks.
_WS = rb"[ \t\n\r]*+"
_SIMPLE = rb"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null|\"[^\"\\\x00-\x1f]*+\")"
_ROW = rb"\[%b(?:%b%b(?:,%b%b%b)*+)?+\]" % (_WS, _SIMPLE, _WS, _WS, _SIMPLE, _WS)
_RUN = rb"(?:(?:%b|%b)%b,%b)++" % (_SIMPLE, _ROW, _WS, _WS)
_ESCAPES = {
    ord(short): bytes([code])
    for short, code in (('"', 34), ("\\", 92), ("/", 47), ("b", 8), ("f", 12), ("n", 10), ("r", 13), ("t", 9))
}
_WORDS: dict[int, tuple[bytes, bool | None]] = {
    ord("n"): (b"null", None),
    ord("t"): (b"true", True),
    ord("f"): (b"false", False),
}


class JsonTextError(ValueError):
    """Text that is not JSON.

    ``reason`` is RapidJSON's sentence, ``offset`` the byte that it refers to.
    """

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at {offset}")
        self.reason = reason
        self.offset = offset


class JsonDepthError(JsonTextError):
    """Arrays and objects nested deeper than MAX_DEPTH."""


class SlowTextError(Exception):
    """Text that only the small reader can read, and that is too long for the caller's thread."""


class Members(dict[str, Any]):
    """Object that may repeat a name.

    The first value counts, as in RapidJSON; ``names`` has all repetitions.
    """

    __slots__ = ("names",)

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        self.names.append(name)
        self.setdefault(name, value)


def loads(text: Buffer) -> Any:
    """Return the value of a JSON document, with orjson's values and errors.

    Other threads may run while a long text is read. Raises orjson.JSONDecodeError, and InvalidArgumentError for a long
    text with an object of too many members.
    """
    if len(text) > LONG_BYTES:
        from remora.protocols.json import pieces  # imported here, because few requests are long

        return pieces.loads(text)
    return orjson.loads(text)


def parse(text: bytes | memoryview, slow_bytes: int | None = None) -> Any:
    """Return the value of a JSON document. The last of equal names counts.

    Raises JsonTextError, SlowTextError for text that orjson refuses and that is longer than ``slow_bytes``, and
    InvalidArgumentError as `loads` does.
    """
    try:
        return loads(text)
    except orjson.JSONDecodeError:
        return _read(text, dict, slow_bytes)


def parse_members(text: bytes | memoryview, slow_bytes: int | None = None) -> Any:
    """Return the value of a JSON document with objects as Members.

    Much slower than `parse`. Raises JsonTextError, and SlowTextError for text longer than ``slow_bytes``.
    """
    return _read(text, Members, slow_bytes)


def _read(text: bytes | memoryview, objects: type[dict[str, Any]], slow_bytes: int | None) -> Any:
    if slow_bytes is not None and len(text) > slow_bytes:
        raise SlowTextError
    return Reader(bytes(text), objects).document()


def has_more_members(text: bytes, count: int) -> bool:
    """Return True if the objects in a JSON document have more than ``count`` members in all.

    The document must be valid.
    """
    # Outside of strings exactly the members have a colon, so most texts need only the first count.
    if len(text) <= LONG_BYTES and text.count(b":") == count:
        return False
    colons = begin = in_string = 0
    while begin < len(text):  # in steps, between which other threads may run
        step = text[begin : begin + LONG_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # a step ends with a whole escape
            step = text[begin : begin + LONG_BYTES + 1]
        begin += len(step)
        if b"\\" in step:
            step = step.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = step.split(b'"')
        colons += b"".join(parts[in_string::2]).count(b":")
        in_string ^= (len(parts) - 1) % 2
    return colons > count


class Reader:
    """Slow and exact reader of one document. Nesting takes no Python stack."""

    __slots__ = ("_at", "_objects", "_simple_run", "_steps", "_text")

    def __init__(self, text: bytes, objects: type[dict[str, Any]] = dict) -> None:
        self._objects = objects
        # A NUL marks the end of the text, so that reading one byte ahead needs no bounds check.
        self._text = text + b"\0"
        self._at = 3 if text.startswith(b"\xef\xbb\xbf") else 0
        self._simple_run: re.Pattern[bytes] | None = re.compile(_RUN)
        self._steps = 0

    def document(self) -> Any:
        """Return the value of the whole document. Raises JsonTextError."""
        if self._skip() == 0:
            self._refuse(EMPTY)
        value = self._tree()
        if self._skip() != 0:
            self._refuse(NOT_SINGULAR)
        return value

    def _refuse(self, reason: str, offset: int | None = None) -> NoReturn:
        raise JsonTextError(reason, self._at if offset is None else offset)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            self._refuse(TOO_LONG)

    def _skip(self) -> int:
        """Skip white space and return the byte that follows, 0 at the end."""
        while True:
            begin = self._at
            space = _SPACE.match(self._text, begin, begin + _RUN_BYTES)
            if space is not None:
                self._at = space.end()
            if self._at < begin + _RUN_BYTES:
                return self._text[self._at]

    def _tree(self) -> Any:
        """Read one value with all that it contains."""
        open_ones: list[dict[str, Any] | list[Any]] = []
        try:
            return self._read_into(open_ones)
        except JsonTextError:
            if len(self._text) > LONG_BYTES:
                release(open_ones)
            raise

    def _read_into(self, open_ones: list[dict[str, Any] | list[Any]]) -> Any:
        """Read one value, with the containers that are not complete in ``open_ones``."""
        names: list[str] = []
        while True:
            value, opened = self._start(names)
            if opened:
                open_ones.append(value)
                if len(open_ones) > MAX_DEPTH:
                    raise JsonDepthError(f"Nested deeper than {MAX_DEPTH}.", self._at)
                continue
            # The value is complete: add it to its container, and close the containers that end here.
            while open_ones:
                holder = open_ones[-1]
                if isinstance(holder, dict):
                    holder[names.pop()] = value
                    more = self._comma(ord("}"), MISSING_COMMA_IN_OBJECT)
                    if more:
                        names.append(self._name())
                else:
                    holder.append(value)
                    more = self._comma(ord("]"), MISSING_COMMA_IN_ARRAY)
                    if more:
                        self._run(holder)
                if more:
                    break
                value = open_ones.pop()
            else:
                return value

    def _start(self, names: list[str]) -> tuple[Any, bool]:
        """Read a scalar, an empty container, or the opening of a container.

        The second value is True only for a container that was just opened.
        """
        self._step()
        byte = self._text[self._at]
        if byte == ord("{"):
            self._at += 1
            if self._skip() == ord("}"):
                self._at += 1
                return self._objects(), False
            names.append(self._name())
            return self._objects(), True
        if byte == ord("["):
            self._at += 1
            if self._skip() == ord("]"):
                self._at += 1
                return [], False
            items: list[Any] = []
            self._run(items)
            return items, True
        return self._scalar(byte), False

    def _comma(self, end: int, reason: str) -> bool:
        """Return True after a comma, False after the closing bracket ``end``."""
        byte = self._skip()
        if byte == ord(","):
            self._at += 1
            self._skip()
            return True
        if byte != end:
            self._refuse(reason)
        self._at += 1
        return False

    def _name(self) -> str:
        """Read a member's name and its colon."""
        if self._text[self._at] != ord('"'):
            self._refuse(MISSING_NAME)
        name = self._string()
        if self._skip() != ord(":"):
            self._refuse(MISSING_COLON)
        self._at += 1
        self._skip()
        return name

    def _run(self, items: list[Any]) -> None:
        """Read the simple elements that come next in one call of orjson.

        The other elements are left for the slow path.
        """
        while self._simple_run is not None:
            run = self._simple_run.match(self._text, self._at, self._at + _RUN_BYTES)  # bounded: other threads may run
            if run is None:
                return
            try:
                items.extend(orjson.loads(b"[%b]" % run.group().rstrip(b" \t\n\r")[:-1]))
            except orjson.JSONDecodeError:
                self._simple_run = None  # never try the same text twice
            else:
                self._at = run.end()
                self._skip()

    def _scalar(self, byte: int) -> Any:
        if byte == ord('"'):
            return self._string()
        if byte in _WORDS:
            word, value = _WORDS[byte]
            self._expect(word)
            return value
        return self._number()

    def _expect(self, word: bytes) -> None:
        for letter in word:
            if self._text[self._at] != letter:
                self._refuse(INVALID_VALUE)
            self._at += 1

    def _number(self) -> int | float:
        start = self._at
        match = _NUMBER.match(self._text, start)
        if match is None:
            return self._named_number()
        self._at = match.end()
        following = self._text[self._at]
        if following == ord(".") and not match["real"]:
            self._refuse(MISSING_FRACTION, self._at + 1)
        if following in b"eE" and not re.search(rb"[eE]", match["real"]):
            signed = self._text[self._at + 1] in b"+-"
            self._refuse(MISSING_EXPONENT, self._at + 1 + signed)
        digits = match.group()
        if not match["real"] and len(digits) <= 20:
            whole = int(digits)
            if -(2**63) <= whole < 2**64:
                return whole
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            self._refuse(NUMBER_TOO_BIG, start)
        return value

    def _named_number(self) -> float:
        """Read NaN, Inf or Infinity, each with an optional minus."""
        sign = -1.0 if self._text[self._at] == ord("-") else 1.0
        self._at += sign < 0
        if self._text[self._at] == ord("N"):
            self._expect(b"NaN")
            return float("nan")
        self._expect(b"Inf")
        if self._text[self._at] == ord("i"):
            self._expect(b"inity")
        return sign * float("inf")

    def _string(self) -> str:
        """Read a string, with ``_at`` on its opening quote."""
        self._at += 1
        parts: list[bytes] = []
        while True:
            begin = self._at
            plain = _PLAIN.match(self._text, begin, begin + _RUN_BYTES)
            if plain is not None:
                parts.append(plain.group())
                self._at = plain.end()
                if self._at == begin + _RUN_BYTES:
                    continue
            byte = self._text[self._at]
            if byte == ord('"'):
                self._at += 1
                return b"".join(parts).decode("utf-8", "surrogateescape")
            if byte == 0:
                self._refuse(MISSING_QUOTE)
            if byte != ord("\\"):
                self._refuse(BAD_ESCAPE)  # a control character
            parts.append(self._escape())

    def _escape(self) -> bytes:
        self._step()
        start = self._at
        kind = self._text[start + 1]
        if kind in _ESCAPES:
            self._at += 2
            return _ESCAPES[kind]
        if kind != ord("u"):
            self._refuse(BAD_ESCAPE)
        code = self._hex(start, start)
        if 0xD800 <= code <= 0xDBFF:
            if self._text[start + 6 : start + 8] != b"\\u":
                self._refuse(BAD_SURROGATE, start)
            low = self._hex(start + 6, start)
            if not 0xDC00 <= low <= 0xDFFF:
                self._refuse(BAD_SURROGATE, start)
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return chr(code).encode("utf-8", "surrogatepass")  # a low surrogate may stand alone, as in Triton's RapidJSON

    def _hex(self, escape: int, blame: int) -> int:
        """Return the code of the ``\\uXXXX`` at ``escape``."""
        digits = self._text[escape + 2 : escape + 6]
        if not re.fullmatch(rb"[0-9A-Fa-f]{4}", digits):
            self._refuse(BAD_HEX, blame)
        self._at = escape + 6
        return int(digits, 16)
