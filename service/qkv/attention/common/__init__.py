"""Functions that several variants share: score blocks, feature sums, masks, gradients."""
