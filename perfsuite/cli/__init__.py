"""The commands of `perfsuite`, one file each."""
