"""Metrics, model statistics, state shared by workers, logs and traces."""
