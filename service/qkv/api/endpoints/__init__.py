"""The endpoints, one file per URL."""
