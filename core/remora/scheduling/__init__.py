"""Batching, scheduling, sequences and ensembles: pure deciders and the code that runs them."""
