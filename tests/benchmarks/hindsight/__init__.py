"""What the gate would have found: regressions of real libraries, with a good release against a bad one."""
