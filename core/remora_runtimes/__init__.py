"""Backends of runtimes beside ONNX Runtime and Python, and models of other libraries' files."""
