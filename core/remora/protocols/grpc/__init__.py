"""The V2 gRPC protocol as pure codecs."""
