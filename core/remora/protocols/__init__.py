"""Wire protocols as pure functions from bytes to data and back, without sockets or a clock."""
