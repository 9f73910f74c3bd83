"""Run `perfsuite` as `python -m perfsuite.cli`, for example if its script is not on the PATH."""

from perfsuite.cli.app import app

app(prog_name="perfsuite")
