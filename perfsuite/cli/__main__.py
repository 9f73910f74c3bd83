"""`python -m perfsuite.cli` is the command `perfsuite`, where its script is not on the path."""

from perfsuite.cli.app import app

app(prog_name="perfsuite")
