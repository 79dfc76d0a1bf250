"""Generated messages of the V2 protocol and of model configurations.

They are wire-identical to Triton's.
"""
