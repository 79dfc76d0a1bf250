"""Reader of protobuf text format with explained errors.

Protobuf's own parser decides what is valid; `pbtxt_errors` explains what it refuses.
"""

from __future__ import annotations

import re

from google.protobuf import text_format
from google.protobuf.message import Message

from remora.config.schema_errors import (
    Path,
    SchemaError,
    is_map,
    is_repeated,
    map_fields,
    schema_of,
    unknown_value,
)

_STRINGS = re.compile(r"""#[^\n]*+|"(?:[^"\n\\]++|\\.)*+"|'(?:[^'\n\\]++|\\.)*+'|["']""")
"""Comments, strings, and the quotes of strings without an end; possessive, so that it never goes back."""
_LONG_STRING = 512


def fill_from_text(message: Message, text: str) -> None:
    """Parse ``text`` into ``message``.

    Raises:
        SchemaError: an invalid text, with line and key path [C21].
    """
    _refuse_open_string(text)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        from remora.config.pbtxt_errors import explain  # imported here, because most texts are valid

        raise explain(schema_of(message), text, error) from error
    _refuse_unknown_numbers(message, ())


def _refuse_open_string(text: str) -> None:
    """Raise SchemaError for a long string that its line does not close.

    protobuf's reader takes time in the square of the length of such a string.
    """
    for found in _STRINGS.finditer(text):
        if len(found[0]) == 1:
            end = text.find("\n", found.start())
            if (len(text) if end < 0 else end) - found.start() > _LONG_STRING:
                line = text.count("\n", 0, found.start()) + 1
                raise SchemaError((), f"a string is not closed on its line: expected {found[0]} at its end", line)


def _refuse_unknown_numbers(message: Message, path: Path) -> None:
    """Refuse enum numbers outside of the schema, which protobuf would keep."""
    for child, value in message.ListFields():
        where = (*path, child.name)
        if child.enum_type is not None:
            for number in value if is_repeated(child) else (value,):
                if number not in child.enum_type.values_by_number:
                    raise SchemaError(where, unknown_value(child.enum_type, number))
        elif is_map(child):
            if map_fields(child)[1].message_type is not None:
                for key, inner in value.items():
                    _refuse_unknown_numbers(inner, (*where, str(key)))
        elif child.message_type is not None:
            if not is_repeated(child):
                _refuse_unknown_numbers(value, where)
                continue
            for index, inner in enumerate(value):
                _refuse_unknown_numbers(inner, (*where, index))
