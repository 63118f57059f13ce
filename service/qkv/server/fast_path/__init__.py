"""The fast path's half at the socket: answers repeated small requests in the protocol."""
