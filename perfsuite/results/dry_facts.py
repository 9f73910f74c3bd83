"""What a dry run says beyond the counts: will the case fit, and how fast can it be at best. Pure data."""

from __future__ import annotations

from typing import Literal

from perfsuite.documents import Data
from perfsuite.results.roofline import Roofline

FitWord = Literal["fits", "tight", "does not fit"]


class Part(Data):
    """Memory of the device that no tensor of the step holds, as a range in bytes."""

    name: str
    low: int
    high: int
    source: str
    """Where the range comes from."""


class Fit(Data):
    """The memory that a rank is predicted to need, and what it has, in bytes."""

    rank: int
    live: int
    """Peak of live tensors."""
    allocated: int
    """Peak of the caching allocator's blocks in use: rounding and the workspaces of cuBLAS are in it."""
    reserved: int
    """Peak of what the caching allocator holds."""
    reserved_expandable: int
    """The same with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""
    built: int = 0
    """The parameters of the whole model, where a rank has them on its device before they are sharded."""
    beside: tuple[Part, ...]
    """What lies beside the caching allocator."""
    card: int
    """The memory of the device."""
    verdict: FitWord

    @property
    def least(self) -> int:
        """Bytes that the device must have in any case: less cannot hold what lives at once."""
        return max(self.allocated, self.built) + sum(part.low for part in self.beside)

    @property
    def most(self) -> int:
        """Bytes with which the allocator never has to give back its cache, all ranges at their upper end."""
        return max(self.reserved, self.built) + sum(part.high for part in self.beside)


class DryFacts(Data):
    """What a dry run says of a case, by the ranks that were run."""

    fit: Fit | None = None
    """Of the rank that needs most. None on a CPU, which has no caching allocator."""
    roofline: Roofline | None = None
    """None where the accelerator's peak is unknown."""
