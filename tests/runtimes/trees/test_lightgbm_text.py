"""Refusal of texts that would make LightGBM read or write out of bounds. Needs no library."""

from __future__ import annotations

import pytest

from remora.errors import InternalError
from remora_runtimes.trees.lightgbm_text import checked_text

TEXT = """tree
version=v4
num_class=1
num_tree_per_iteration=1
label_index=0
max_feature_idx=3
objective=binary sigmoid:1
feature_names=a b c d
feature_infos=[0:1] [0:1] [0:1] 0:1:2
tree_sizes=500 200

Tree=0
num_leaves=3
num_cat=1
split_feature=0 3
threshold=0.5 0
decision_type=2 9
left_child=1 -1
right_child=-2 -3
leaf_value=0.1 0.2 0.3
cat_boundaries=0 2
cat_threshold=12 7
is_linear=0


Tree=1
num_leaves=1
num_cat=0
leaf_value=0.5
is_linear=1
leaf_const=0.5
num_features=2
leaf_features=0 3
leaf_coeff=1.5 -2

end of trees

parameters:
[boosting: gbdt]
end of parameters
"""
MULTICLASS = TEXT.replace("num_class=1", "num_class=2").replace("iteration=1", "iteration=2")
MULTICLASS = MULTICLASS.replace("binary sigmoid:1", "multiclass num_class:2")


def test_the_library_reads_the_trees_and_nothing_that_it_would_trust() -> None:
    text = checked_text(TEXT)
    assert "tree_sizes" not in text
    assert "parameters" not in text
    assert text.startswith("tree\nversion=v4\n")
    assert text.endswith("leaf_coeff=1.5 -2\n\n\nend of trees\n")
    for row in TEXT.partition("\nend of trees")[0].splitlines():
        assert f"{row}\n" in text or row.startswith("tree_sizes")
    assert checked_text(text) == text
    assert "\naverage_output\n" in checked_text(TEXT.replace("label_index=0", "label_index=0\naverage_output"))
    checked_text(MULTICLASS)


@pytest.mark.parametrize(
    ("line", "other", "reason"),
    [
        ("left_child=1 -1", "left_child=9 -1", "a child that is not there"),
        ("left_child=1 -1", "left_child=0 -1", "a child that is not there"),
        ("right_child=-2 -3", "right_child=-2 -4", "a child that is not there"),
        ("right_child=-2 -3", "right_child=-2 -2", "two parents"),
        ("left_child=1 -1", "left_child=1", "without children's numbers"),
        ("leaf_value=0.1 0.2 0.3", "leaf_value=0.1", "without children's numbers"),
        ("num_leaves=3", "num_leaves=2147483647", "without children's numbers"),
        ("num_leaves=3", "num_leaves=3\nnum_leaves=3", "key 'num_leaves' twice"),
        ("split_feature=0 3", "split_feature=0 4", "not among the 4"),
        ("left_child=1 -1", "left_child=x -1", "a word for a number.*'x'"),
        ("left_child=1 -1", "left_child=1 -0_1", "a word for a number.*1 -0_1"),
        ("left_child=1 -1", f"left_child=1 -{'9' * 30}", "a word for a number"),
        ("threshold=0.5 0", "threshold=0.5", "nodes without decisions"),
        ("decision_type=2 9", "decision_type=2", "nodes without decisions"),
        # Bitsets of categories.
        ("threshold=0.5 0", "threshold=0.5 1", "categories that are not there"),
        ("threshold=0.5 0", "threshold=0.5 -1", "categories that are not there"),
        ("threshold=0.5 0", "threshold=0.5 nan", "categories that are not there"),
        ("num_cat=1", "num_cat=0", "categories that are not there"),
        ("num_cat=1", "num_cat=2147483647", "categories that are not there"),
        ("cat_boundaries=0 2", "cat_boundaries=0 99999999", "categories that are not there"),
        ("cat_boundaries=0 2", "cat_boundaries=-9 2", "categories that are not there"),
        ("num_cat=1\n", "num_cat=2\n", "categories that are not there"),
        # Leaves that are linear functions.
        ("num_features=2", "num_features=3", "leaves without their coefficients"),
        ("leaf_coeff=1.5 -2", "leaf_coeff=1.5", "leaves without their coefficients"),
        ("leaf_features=0 3", "leaf_features=0 4", "not among the 4"),
        # The head.
        ("num_class=1", "num_class=1000000000", "has 1000000000 classes"),
        ("max_feature_idx=3", "max_feature_idx=2000000000", "not as many feature_names"),
        ("max_feature_idx=3\n", "", "has no max_feature_idx"),
        ("objective=binary sigmoid:1", "objective=multiclass num_class:9", "for 9 classes, the forest for 1"),
        ("objective=binary sigmoid:1", "objective=multiclassova", "has no number of classes"),
        ("\nend of trees", "", "not a whole model"),
        # What the library reads otherwise than it looks.
        ("label_index=0", "=tree_sizes=0 99999999", "line '=tree_sizes=0 999999', which is not key"),
        ("num_cat=1", "=num_leaves=99\nnum_cat=1", "which is not key"),
        ("num_cat=1", "internal_value=0\0\nnum_cat=1", "a zero byte"),
    ],
)
def test_an_invalid_text_is_refused(line: str, other: str, reason: str) -> None:
    assert line in TEXT
    with pytest.raises(InternalError, match=reason):
        checked_text(TEXT.replace(line, other))
