"""Codecs of OpenAI's routes, between bytes and queries or answers. Pure."""
