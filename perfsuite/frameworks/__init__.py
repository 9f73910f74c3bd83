"""One file per framework; see `perfsuite.framework` for what each must hold."""
