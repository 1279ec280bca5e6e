"""Two ranks against one process: the same update, the same blocks, the same numbers."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
import torch

CASES = ["plain", "rare", "packed, kl, dpace", "lora, argmax"]
WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(one process with twice the batch, [rank 0, rank 1])."""
    folder = tmp_path_factory.mktemp("distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, paths = [], os.pathsep.join(sys.path)
    for rank in range(2):
        places = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=port)
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": paths,
            **{key: str(value) for key, value in places.items()},
        }
        with (folder / f"log{rank}.txt").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), str(rank), str(folder)], env=env, stdout=log, stderr=subprocess.STDOUT
                )
            )
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], (folder / "log0.txt").read_text()[-3000:] + (folder / "log1.txt").read_text()[-3000:]
    single = distributed_worker.everything(folder / "single", batch_size=4)
    return single, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_close(first, second, case):
    for name in first:
        assert (first[name] - second[name]).norm() <= 1e-5 * first[name].norm(), (case, name)


@pytest.mark.parametrize("case", CASES)
def test_first_update_equals_that_of_one_process(results, case):
    """The weight sum is taken over all ranks; in case "rare" a rank may have no label and still takes part."""
    single, ranks = results
    assert_close(single[case]["weights"][0], ranks[0][case]["weights"][0], case)


@pytest.mark.parametrize("case", CASES)
def test_ranks_end_with_equal_weights(results, case):
    """No rank skips a step or steps on its own gradient."""
    _, ranks = results
    last = [rank[case]["weights"][-1] for rank in ranks]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    assert all(parameter.isfinite().all() for parameter in last[0].values())


def test_every_rank_draws_anew_in_every_epoch(results):
    """The epoch reaches the data set of every rank; together the ranks see each example once an epoch."""
    _, ranks = results
    seen = sorted(ranks[0]["plain"]["seen"] + ranks[1]["plain"]["seen"])
    assert seen == [(epoch, index) for epoch in range(2) for index in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_the_whole_run_equals_that_of_one_process(results, case):
    """All updates, so also the blocks of the second epoch."""
    single, ranks = results
    assert_close(single[case]["weights"][-1], ranks[0][case]["weights"][-1], case)


@pytest.mark.parametrize("case", CASES)
def test_logged_curve_equals_that_of_one_process(results, case):
    """`loss`, `slot_accuracy` and `block_acceptance_length` of every step are of all ranks' slots."""
    single, ranks = results
    assert len(single[case]["log"]) == len(ranks[0][case]["log"]) >= 2
    for entry, other in zip(single[case]["log"], ranks[0][case]["log"]):
        assert other == pytest.approx(entry, rel=1e-5)


def test_evaluation_equals_that_of_one_process(results):
    """Five examples over two ranks: filling up the last batch must not count an example twice."""
    single, ranks = results
    for key, value in single["plain"]["metrics"].items():
        assert ranks[0]["plain"]["metrics"][key] == pytest.approx(value, rel=1e-5), key
