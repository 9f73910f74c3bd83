"""Start, watch and end one launch of a case on this machine."""
