"""Count the work of a training: operators, bytes, Python calls, and objects that it keeps."""
