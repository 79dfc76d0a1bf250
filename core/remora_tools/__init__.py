"""Work beside the serving: commands for a server, measuring, tuning, scoring and releases."""
