"""Count the work of a training run: operators, bytes, Python calls, and objects that it keeps."""
