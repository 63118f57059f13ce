"""The jobs behind compare and sweep."""
