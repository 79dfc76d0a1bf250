"""The wire protocols: pure pairs of bytes-to-data and data-to-bytes; nothing here opens a socket or reads a clock."""
