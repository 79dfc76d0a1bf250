"""Models that serve: their versions, loading, lifecycle and memory."""
