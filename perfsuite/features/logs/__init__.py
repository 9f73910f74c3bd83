"""Judge step times that other tools measured."""
