from perfsuite.analysis.intervals import without


def test_what_others_cover_is_cut_out_and_leaves_nothing_empty() -> None:
    assert without([(0, 4), (6, 8)], [(1, 2), (3, 7)]) == [(0, 1), (2, 3), (7, 8)]
    assert without([(0, 2)], [(0, 1)]) == [(1, 2)]
    assert without([(0, 2)], [(0, 1), (1, 2)]) == []
