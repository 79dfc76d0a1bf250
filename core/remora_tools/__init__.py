"""Commands beside the server that call, measure, tune and score models, and manage keys."""
