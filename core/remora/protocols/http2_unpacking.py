"""Header blocks of HTTP/2 unpacked (RFC 7541); the law: pure, and what means the same is unpacked once."""

from __future__ import annotations

from hpack import Decoder, HPACKError

from remora.protocols.http2_frames import COMPRESSION_ERROR, Fields, Http2Error

_MEMO_ENTRIES = 256
_MEMO_BYTES = 512


class Unpacker:
    """Those of one connection, in the order in which they come; at most ``most_bytes`` each, unpacked."""

    def __init__(self, most_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._memo: dict[bytes, Fields] = {}

    def fields(self, block: bytes) -> Fields:
        """Unpack a block. Raises Http2Error."""
        return self._memo.get(block) or self._decode(block)

    def _decode(self, block: bytes) -> Fields:
        """What changes nothing in the table that blocks refer to, means the same when it comes again."""
        entries = self._decoder.header_table.dynamic_entries
        before = (len(entries), id(entries[0]) if entries else 0, self._decoder.header_table_size)
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except HPACKError as error:
            raise Http2Error(COMPRESSION_ERROR, f"a header block cannot be read: {error}") from error
        if (len(entries), id(entries[0]) if entries else 0, self._decoder.header_table_size) != before:
            self._memo.clear()
        elif len(block) <= _MEMO_BYTES:
            if len(self._memo) >= _MEMO_ENTRIES:
                self._memo.clear()
            self._memo[block] = fields
        return fields
