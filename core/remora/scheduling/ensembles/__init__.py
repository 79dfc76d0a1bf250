"""Ensembles: graphs of models, executed step by step."""
