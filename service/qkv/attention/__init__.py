"""The mathematics: variants, their common parts, layers. No HTTP, queues or devices."""
