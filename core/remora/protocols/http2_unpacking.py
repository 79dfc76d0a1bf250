"""Decoder of HTTP/2 header blocks with a memo of their fields (RFC 7541).

The memo holds the blocks that leave the dynamic table as it was. Invariant: every block has the fields that a decoder
without a memo gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError

from remora.protocols.http2.frames import COMPRESSION_ERROR, Fields, Http2Error

_MEMO_ENTRIES = 256
_MEMO_BYTES = 512
_MEMO_FIELDS = 64
_MEMO_FIELD_BYTES = 4_096
"""Largest size of the fields of a memoized block, because a short block may refer to long ones in the table."""
_FIELD_WORK, _BLOCK_BYTES = 2, 4
"""Work of a field, and bytes of a block in Huffman's code whose decoding takes as long as the handling of a frame."""

M = TypeVar("M")


class Unpacker(Generic[M]):
    """Decoder of one connection's header blocks in order.

    Args:
        most_bytes: longest block, unpacked.
        read: returns the form in which fields are kept and returned; by default they stay as they are. It depends on
            the fields alone and does not raise.
    """

    def __init__(self, most_bytes: int, read: Callable[[Fields], M] = tuple) -> None:  # type: ignore[assignment]
        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._read = read
        self._memo: dict[bytes, M] = {}
        self.known: Callable[[bytes], M | None] = self._memo.get
        """Returns the fields of a block that is in the memo, else None."""
        self.work = 0
        """Work of decoding since the reader last reset it, in units of handling a frame."""

    def fields(self, block: bytes) -> M:
        """Return the fields of a block, in the form of ``read``. Raises Http2Error."""
        known = self._memo.get(block)
        return known if known is not None else self._decode(block)

    def _decode(self, block: bytes) -> M:
        """Decode a block.

        A change of the dynamic table empties the memo, because later blocks refer to that table.
        """
        entries = self._decoder.header_table.dynamic_entries
        # Keep the entry, not its id(), because Python reuses the id of a freed tuple.
        newest = entries[0] if entries else None
        before = (len(entries), self._decoder.header_table_size)
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except HPACKError as error:
            raise Http2Error(COMPRESSION_ERROR, f"invalid header block: {error}") from error
        self.work += _FIELD_WORK * len(fields) + len(block) // _BLOCK_BYTES
        kept = self._read(fields)
        same = (entries[0] if entries else None) is newest
        if not same or (len(entries), self._decoder.header_table_size) != before:
            self._memo.clear()
        elif (
            len(block) <= _MEMO_BYTES
            and len(fields) <= _MEMO_FIELDS  # a field may take one byte in a block
            and sum([len(name) + len(value) for name, value in fields]) <= _MEMO_FIELD_BYTES
        ):
            if len(self._memo) >= _MEMO_ENTRIES:
                self._memo.clear()
            self._memo[block] = kept
        return kept
