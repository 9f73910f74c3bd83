"""Turn the health sampler off in an arm of a comparison: `--perf-against=PYTHONPATH=tests/gpu/no_sampler`."""

import sys

if any("perfsuite.node.agent" in word for word in sys.orig_argv):
    from perfsuite.node import health_sampler

    health_sampler.EVERY_S = 1e9  # of all samples, only the first and the last one remain
