"""Tests with hindsight whether the gate would have found regressions of real libraries.

Each regression is a bad release of a library, which is compared with a good one.
"""
