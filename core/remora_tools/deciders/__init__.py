"""Pure deciders of the tools: arrivals, batches, simulation, objectives and stability."""
