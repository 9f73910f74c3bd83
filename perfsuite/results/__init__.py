"""What was measured, as files, and how the files of one launch become one document."""
