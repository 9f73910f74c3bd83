"""`perfsuite selftest`: does the gate catch every fault?"""
