"""A session: measures one case after another, and keeps what it found.

    Session(setup, way).measure(case)  -->  way.judge(trial): launches until decided  -->  results.json

Begin with `perfsuite.session.session`; `perfsuite.session.way` lists the ways to measure. Imports
neither torch nor pytest.
"""
