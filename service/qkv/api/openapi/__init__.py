"""The OpenAPI document. FastAPI makes it of the routes and their models."""
