"""Version of remora, which the build, the command line and the server's metadata read."""

__version__ = "0.1.0"
