"""Random calls with a drafter, compared with plain generate. The cases, and what one is, are in fuzzing.py."""

import pytest
import torch
from fuzz_cases import draw_case
from fuzzing import run_case

CASES, SLOW_CASES = 120, 2000
GROUPS = 12


def _run(seeds) -> None:
    failures = []
    with torch.no_grad():
        for seed in seeds:
            case = draw_case(seed)
            result = run_case(case)
            if result.failed:
                failures.append(f"{result.status}: {case}\n  {result.detail}")
    assert not failures, "\n".join(["python tests/generation/fuzzing.py --seed N runs one again", *failures])


@pytest.mark.parametrize("group", range(GROUPS))
def test_greedy_equals_plain_generate(group):
    """The first 120 cases: every configuration class at least once."""
    _run(range(group, CASES, GROUPS))


@pytest.mark.slow
@pytest.mark.parametrize("group", range(100))
def test_greedy_equals_plain_generate_in_many_cases(group):
    """All others."""
    _run(range(CASES + group, SLOW_CASES, 100))
