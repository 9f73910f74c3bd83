"""Measure cases one after another and keep the results. Start reading at `session.session`."""
