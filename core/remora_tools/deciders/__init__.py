"""Pure deciders of the tools: arrivals, batch sizes, objectives, latencies and stability."""
