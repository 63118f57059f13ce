"""The layouts of attention weights, one file each: the file's name is the layout's name."""
