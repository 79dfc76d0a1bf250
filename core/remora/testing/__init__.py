"""What authors of extensions test them with; nothing here is imported by a server."""
