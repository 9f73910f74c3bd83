"""Dry runs: count the work of one rank of a full-size case in one process, without computing anything.

Torch's `fake` process group completes every collective at once, and `FakeTensorMode` allocates no memory for
tensors. In this folder, torch is used only by `rank`, by `script`, and by modules that these two import. All
of these modules run in the process of the dry run.
"""
