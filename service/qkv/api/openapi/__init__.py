"""The OpenAPI document. Each endpoint has the schemas of its operation where it is registered."""
