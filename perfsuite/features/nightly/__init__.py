"""Write the first files of a repository that measures its training, and run its nights."""
