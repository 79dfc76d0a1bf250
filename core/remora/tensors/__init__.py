"""Tensors on devices, in shared memory and as text."""
