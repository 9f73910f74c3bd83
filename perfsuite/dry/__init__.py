"""The dry run: a case at its full size in one process, without its hardware. Nothing is computed, all is
counted.

One process is one rank of the case's world. torch's `fake` process group answers every collective at once,
and `FakeTensorMode` gives each tensor a shape, a dtype and a device, but no memory. The framework's own
`build` and the workload's own `run` are what runs, under the counting of a real launch.

`driver`, `limits` and `guard` import no torch; the others are loaded by the process of a dry run alone, never
by one that measures.
"""
