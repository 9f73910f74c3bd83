"""Run the command `perfsuite` as `python -m perfsuite.cli` if its script is not on the path."""

from perfsuite.cli.app import app

app(prog_name="perfsuite")
