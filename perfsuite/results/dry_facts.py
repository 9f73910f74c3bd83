"""What a dry run says beyond the counts: will the case fit, and how fast can it be at best. Pure data."""

from __future__ import annotations

from typing import Literal

from perfsuite.documents import Data

FitWord = Literal["fits", "tight", "does not fit"]


class MemoryPart(Data):
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
    outside: tuple[MemoryPart, ...]
    """What the process holds outside of the caching allocator."""
    card: int
    """The memory of the device."""
    verdict: FitWord

    @property
    def least(self) -> int:
        """Bytes that the device must have in any case: less cannot hold what lives at once."""
        return max(self.allocated, self.built) + sum(part.low for part in self.outside)

    @property
    def most(self) -> int:
        """Bytes with which the allocator never has to give back its cache, all ranges at their upper end."""
        return max(self.reserved, self.built) + sum(part.high for part in self.outside)


class Roofline(Data):
    """What one step takes at least, on the rank that needs most; bytes and FLOPs are that rank's."""

    flops: int
    """Recomputation included."""
    peak_flops: float
    """Dense, at the case's precision, per second."""
    wire_bytes: float
    """Over the link between GPUs of one machine, in one direction."""
    link_bytes_per_s: float | None
    """Of that link in one direction; None where no datasheet gives it: then the wire takes no time here."""
    between_machines_bytes: float
    """Of groups that span machines, whose link is unknown: they take no time here."""
    tokens: int
    """Of all ranks in one step; samples where the case has no tokens."""

    @property
    def compute_s(self) -> float:
        """Seconds of computation at the peak."""
        return self.flops / self.peak_flops

    @property
    def wire_s(self) -> float:
        """Seconds of communication between the GPUs of one machine."""
        return self.wire_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0

    @property
    def step_s(self) -> float:
        """Seconds that a step takes at least."""
        return max(self.compute_s, self.wire_s)

    @property
    def bound_by(self) -> Literal["computation", "communication"]:
        """Which of the two limits is the larger."""
        return "computation" if self.compute_s >= self.wire_s else "communication"

    @property
    def tokens_per_s(self) -> float:
        """The most tokens/s of all ranks together."""
        return self.tokens / self.step_s

    def share(self, tokens_per_s: float) -> float:
        """Return which share of the most a speed of all ranks together is: 1 is the roofline."""
        return tokens_per_s / self.tokens_per_s


class DryFacts(Data):
    """What a dry run says of a case, by the ranks that were run."""

    fit: Fit | None = None
    """Of the rank that needs most. None on a CPU, which has no caching allocator."""
    roofline: Roofline | None = None
    """None where the accelerator's peak is unknown."""
