"""Create the initial files of a repository (`perfsuite init`) and run its nightly sessions (`night`)."""
