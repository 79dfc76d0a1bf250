"""Captured requests and the values of releases: their files and transitions. Pure."""
