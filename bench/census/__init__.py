"""Census of the model types of transformers: which layers are served, and which are right."""
