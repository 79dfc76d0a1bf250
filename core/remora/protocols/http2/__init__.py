"""HTTP/2 as data: frames, flow control, keepalive."""
