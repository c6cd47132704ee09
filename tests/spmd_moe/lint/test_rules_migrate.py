"""What is found in the guide's own files, and in the bugs as people write them."""

import ast
from pathlib import Path

import pytest

from spmd_moe.lint.look import look_at_file
from spmd_moe.lint.record import Finding, Unread
from tests.migrate.patterns import FOLDER, NAMES, ROOT

# (pattern, file) -> rules. Versions in placements and in spmd_types, and one device, have
# none. Where the wrong version is wrong by what it leaves out (replicated_weights) or calls
# a function of another file (dispatch_combine), its own text shows nothing.
EXPECTED = {
    ("column_row_parallel", "before"): "from-local to-local",
    ("column_row_parallel", "wrong"): "added-first raw-collective",
    ("counts_and_bias", "before"): "counts",
    ("counts_and_bias", "wrong"): "counts",
    ("expert_tensor_parallel", "before"): "from-local to-local",
    ("fsdp2_with_ep", "before"): "divide-factor from-local rank-arithmetic",
    ("fsdp2_with_ep", "wrong"): "divide-factor",
    ("gradient_clipping", "before"): "flag reduced-by-hand",
    ("local_map", "before"): "from-local to-local",
    ("local_map", "wrong"): "from-local local-map to-local",
    ("local_tensors", "before"): "from-local",
    ("local_tensors", "wrong"): "from-local to-local",
    ("loss_averaging", "before"): "from-local to-local",
    ("loss_averaging", "wrong"): "local-mean to-local",
    ("scatter", "before"): "counts rank-arithmetic",
    ("sequence_parallel_norms", "before"): "from-local to-local",
    ("sequence_parallel_norms", "wrong"): "from-local to-local",
    ("token_indices", "before"): "even-sizes",
    ("token_indices", "wrong"): "even-sizes rank-arithmetic",
    ("uneven_sequences", "before"): "to-local",
    ("uneven_sequences", "wrong"): "even-sizes",
    ("vocabulary_parallel", "before"): "masked-vocabulary rank-arithmetic",
    ("vocabulary_parallel", "wrong"): "from-local full-tensor",
}


def findings(file: Path) -> list[Finding]:
    said = look_at_file(file)
    assert not isinstance(said, Unread), said
    return said


@pytest.mark.parametrize("name", NAMES)
def test_the_files_of_a_pattern(name: str) -> None:
    for file in sorted((FOLDER / name).glob("*.py")):
        expected = set(EXPECTED.get((name, file.stem), "").split())
        assert {one.rule for one in findings(file)} == expected, file.stem


# The published bugs: the class or function in spmd_moe/bugs -> what is found in it. Right
# programs are found where they too have the pattern, such as a sum over a group by hand.
IN_BUGS = {
    "placed_rows": "even-sizes",
    "scored_experts": "full-tensor to-local",
    "cut_experts": "to-local",
    "routed_in_dtensor": "full-tensor to-local",
    "masked_in_dtensor": "to-local",
    "B50": "full-tensor raw-collective to-local",
    "loss_in_dtensor": "full-tensor to-local",
    "B67": "full-tensor",
    "averaged_over_edp": "average",
    "in_dtensor": "to-local",
    "shares_in_dtensor": "to-local",
    "B26": "average",
    "with_count_of_tokens": "counts",
    "with_count_in_dtensor": "to-local",
    "scattered": "even-sizes",
    "combined_in_dtensor": "to-local",
    "chosen_in_dtensor": "to-local",
    "MeanOfMeans": "average reduced-by-hand",
    "AveragedInOptimizer": "average reduced-by-hand",
    "AveragedShares": "average",
    "SumOverTp": "counts",
    "CombineRows": "even-sizes rank-arithmetic",
    "EvenTokens": "even-sizes",
    "PlainGather": "raw-collective",
    "SinksInTheNorm": "clip",
}


def test_the_bugs_that_are_written_in_raw_words() -> None:
    there: dict[str, set[str]] = {}
    for file in sorted((ROOT / "spmd_moe" / "bugs").rglob("*.py")):
        tree = ast.parse(file.read_text())
        for one in findings(file):
            for node in tree.body:
                is_around = node.lineno <= one.line <= (node.end_lineno or 0)
                if is_around and isinstance(node, ast.ClassDef | ast.FunctionDef):
                    there.setdefault(node.name, set()).add(one.rule)
    assert there == {name: set(rules.split()) for name, rules in IN_BUGS.items()}
