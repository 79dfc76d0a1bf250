"""Values of releases and their transitions. Pure."""
