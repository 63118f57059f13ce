"""The jobs of compare and sweep requests."""
