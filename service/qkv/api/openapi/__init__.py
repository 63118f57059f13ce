"""The OpenAPI document, its schemas and its examples. `document.py` is the entry point."""
