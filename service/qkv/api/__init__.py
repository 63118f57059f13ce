"""The HTTP API: the application, middleware and request bodies."""
