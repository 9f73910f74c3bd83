"""Analyse the files of launches: compute figures, reduce traces, judge machines' health, find causes of
failures."""
