"""The fast path's half in the API: reuses the validation of repeated small requests."""
