"""Test support for authors of extensions, not imported by a server."""
