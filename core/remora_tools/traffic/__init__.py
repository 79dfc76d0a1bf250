"""Captures of a server's requests, and the files that keep them."""
