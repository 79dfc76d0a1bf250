"""Deciding which requests run together, and running them; the law: deciders are pure, only `scheduler` moves."""
