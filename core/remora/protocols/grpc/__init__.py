"""Codecs of the V2 gRPC protocol."""
