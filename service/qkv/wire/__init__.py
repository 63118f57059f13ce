"""Wire formats: bytes to named raw tensors and back. Used by the server and the client alike."""
