"""Plug-in of remora: models that greet, paths that ask them, a command and a metric."""
