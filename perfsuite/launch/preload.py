"""Imported by the fork server alone, to load torch and to tie itself to the launcher.

The ranks are the fork server's children and die with it; the server must die with the launcher. That its pipe
is closed is not enough, because the ranks have that pipe open, too.
"""

import torch  # noqa: F401  imported once here instead of once per rank

from perfsuite.worker.leash import die_with_parent

die_with_parent()
