"""Inject faults on request, to test whether perfsuite finds them."""
