import random

import pytest

from loadgen import simulate
from loadgen.simulate import BrokenInvariant, Machine, Simulation, random_case
from loadgen.workload import Conversation, Shape, Turn, poisson

SHAPE = Shape(turns=4, prompt_tokens=120, answer_tokens=40, think_s=2.0, spread=0.4)


def run(policy: str, *, seed: int = 3, rate: float = 2.0, **changes) -> Simulation:
    settings = {"hbm_blocks": 160, "dram_blocks": 600, "disk_blocks": 0, "window": 6, "max_seqs": 4, **changes}
    conversations = poisson(rng=random.Random(seed), count=24, rate_per_s=rate, shape=SHAPE)
    simulation = Simulation(
        machine=Machine(policy=policy, **settings), conversations=conversations, rng=random.Random(seed)
    )
    simulation.run()
    return simulation


def test_random_servers_keep_what_they_promise():
    for seed in range(150):
        random_case(seed).run()


def test_a_seed_is_replayed_to_the_last_token():
    for seed in range(20):
        digests = []
        for _ in range(2):
            case = random_case(seed)
            case.run()
            digests.append((case.digest, case.now, case.steps))
        assert digests[0] == digests[1]
    assert len({random_case(seed).digest for seed in range(5)}) == 1, "nothing was scheduled yet"


@pytest.mark.parametrize("policy", ["car", "priority", "fcfs"])
def test_every_turn_is_answered(policy):
    simulation = run(policy)
    assert len(simulation.records) > 60
    assert all(record.done_s is not None for record in simulation.records)
    cached = sum(record.cached_tokens for record in simulation.records)
    assert cached > 0.5 * sum(record.prompt_tokens for record in simulation.records), "histories are reused"


def test_a_lone_turn_takes_what_its_steps_take():
    machine = Machine(hbm_blocks=40, dram_blocks=0, disk_blocks=0, policy="car", window=4, max_seqs=2)
    conversations = [Conversation("c", "", 1.0, (Turn(100, 3, 0.0),))]
    simulation = Simulation(machine=machine, conversations=conversations, rng=random.Random(0))
    simulation.run()
    # 5 ms + 100 * 0.4 ms + 100 * 50 / 1000 * 0.1 ms, then two rows behind 100 and 101 tokens.
    assert simulation.records[0].ttft_s == pytest.approx(0.0455)
    decode_s = 2 * (0.005 + 0.0005) + (100 + 101) / 1000 * 0.0001
    assert simulation.records[0].done_s == pytest.approx(1.0455 + decode_s)


def test_a_broken_promise_is_told_with_its_seed(monkeypatch, capsys):
    def broken(self, started):
        self._check(self.steps < 3, "something")

    monkeypatch.setattr(Simulation, "_check_invariants", broken)
    assert simulate.main(["--first", "5", "--seeds", "1"]) == 1
    assert "seed 5: BrokenInvariant: something (step 3" in capsys.readouterr().err


def test_what_cannot_end_is_noticed(monkeypatch):
    monkeypatch.setattr(simulate, "_MOST_STEPS", 3)
    with pytest.raises(BrokenInvariant, match="do not come to an end"):
        run("car")
