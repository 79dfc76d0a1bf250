"""Language models: their engines, OpenAI's routes, and the metrics of tokens."""
