"""Front processes, which own the connections for an engine in another process."""
