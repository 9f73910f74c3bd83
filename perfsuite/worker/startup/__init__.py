"""A directory that is the first entry of PYTHONPATH in a measured command (see `sitecustomize`)."""
