"""Checks in hindsight whether the gate would have found regressions of real libraries.

For each regression, the bad release of a library is compared with a good release.
"""
