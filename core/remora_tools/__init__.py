"""Commands that measure, tune and score: `bench`, `tune`, `score`, `replay` and `cost`."""
