"""Generated messages of the V2 protocol and of model configurations, wire-identical to Triton's."""
