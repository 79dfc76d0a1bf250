"""Codecs of the V2 REST protocol, of generate and of predict."""
