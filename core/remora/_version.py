"""The version, in the one place that the build, the command line and the server's metadata read it from."""

__version__ = "0.1.0"
