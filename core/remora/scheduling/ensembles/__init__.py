"""Ensembles: graphs of models, run step by step."""
