"""Figures of attention for notebooks and papers, as SVG, PDF and PNG."""
