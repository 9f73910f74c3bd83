"""Imported by the fork server alone: what the ranks share, and a leash. Import has the side effect.

The ranks are the fork server's children and die with it; it must die with the launcher. Closing its pipe is
not enough, because the ranks hold that pipe, too.
"""

import torch  # noqa: F401  imported once here instead of once per rank

from perfsuite.worker.leash import die_with_parent

die_with_parent()
