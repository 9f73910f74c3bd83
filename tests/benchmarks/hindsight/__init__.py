"""What the gate would have found: regressions of real libraries, a good release against a bad one."""
