"""The dry run: a case at its full size as one rank, in one process: nothing is computed, all is counted.

torch's `fake` process group answers every collective, and `FakeTensorMode` gives tensors no memory. Only
`rank` and `script`, in that process, and what these import of this folder import torch.
"""
