"""Count what a training does: operators, bytes, calls of Python, objects that it keeps."""
