"""Fast path of the server: responds to repeated small requests in the HTTP protocol."""
