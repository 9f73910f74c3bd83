"""Dry runs: count the work of one rank of a full-size case in one process, without computing anything.

Torch's `fake` process group completes every collective at once, and `FakeTensorMode` allocates no memory for
tensors. Only `rank`, `script` and the modules of this folder that they import use torch. These modules run in
the process of the dry run.
"""
