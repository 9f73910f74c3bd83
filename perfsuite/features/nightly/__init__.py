"""The first files of a repository that measures its training, and its nights."""
