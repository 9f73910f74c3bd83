"""The dry run: one rank of a full-size case in one process, which computes nothing and counts everything.

Torch's `fake` process group answers every collective, and `FakeTensorMode` gives tensors no memory. Only
`rank` and `script`, which run in that process, and the modules of this folder that they import, import torch.
"""
