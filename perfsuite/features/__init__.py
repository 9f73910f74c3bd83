"""Features that the rest of perfsuite does not need.

Each feature is a folder with its own code and, in most cases, its own commands.
"""
