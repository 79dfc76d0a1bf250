"""JSON as Triton reads and prints it."""
