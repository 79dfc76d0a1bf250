"""What the process may use of the machine, and how it asks for it; the law: nothing here knows models or wires."""
