"""One file per framework; see `perfsuite.frameworks.base` for what each must hold."""
