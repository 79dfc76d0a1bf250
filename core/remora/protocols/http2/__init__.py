"""HTTP/2 frames, flow control and keepalive as data."""
