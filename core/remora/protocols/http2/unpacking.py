"""Decoder of HTTP/2 header blocks with a memo (RFC 7541).

The memo holds the blocks that leave the dynamic table as it was. Invariant: every block has the fields that a decoder
without a memo gives it.
"""

from __future__ import annotations

from hpack import Decoder, HPACKError

from remora.protocols.http2.frames import COMPRESSION_ERROR, Fields, Http2Error

_MEMO_ENTRIES = 256
_MEMO_BYTES = 512
_MEMO_FIELDS = 64


class Unpacker:
    """Decoder of one connection's header blocks in order.

    Each has at most ``most_bytes``, unpacked.
    """

    def __init__(self, most_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._memo: dict[bytes, Fields] = {}

    def fields(self, block: bytes) -> Fields:
        """Decode a block. Raises Http2Error."""
        return self._memo.get(block) or self._decode(block)

    def _decode(self, block: bytes) -> Fields:
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
        same = (entries[0] if entries else None) is newest
        if not same or (len(entries), self._decoder.header_table_size) != before:
            self._memo.clear()
        elif len(block) <= _MEMO_BYTES and len(fields) <= _MEMO_FIELDS:  # a field may take one byte in a block
            if len(self._memo) >= _MEMO_ENTRIES:
                self._memo.clear()
            self._memo[block] = fields
        return fields
