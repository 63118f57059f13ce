"""The OpenAPI document, its schemas and its examples."""
