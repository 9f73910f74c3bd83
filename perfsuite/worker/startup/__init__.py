"""A directory that leads PYTHONPATH for a measured command: see `sitecustomize`."""
