"""gRPC over HTTP/2: the listener, its calls and streams."""
