"""JSON codecs that read and print as Triton does."""
