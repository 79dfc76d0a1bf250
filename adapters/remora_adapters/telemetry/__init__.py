"""Exporters of metrics, traces and log records to collectors and CloudWatch."""
