"""Tensors outside plain arrays: on devices, in shared memory, as text."""
