"""`perfsuite doctor`: is this machine good? Its checks by what they look at."""
