"""Processes and sockets: supervisor, workers and HTTP connections."""
