from reprise.loadgen.virtual.random_servers import main, random_case
from reprise.loadgen.virtual.simulation import Simulation


def test_random_servers_keep_what_they_promise():
    for seed in range(62):
        random_case(seed).run()


def test_a_seed_is_replayed_to_the_last_token():
    for seed in range(8):
        digests = []
        for _ in range(2):
            case = random_case(seed)
            case.run()
            digests.append((case.digest, case.now, case.steps))
        assert digests[0] == digests[1]
    assert len({random_case(seed).digest for seed in range(5)}) == 1, "nothing was scheduled yet"


def test_a_broken_promise_is_told_with_its_seed(monkeypatch, capsys):
    def broken(self, started):
        self._check(self.steps < 3, "something")

    monkeypatch.setattr(Simulation, "_check_invariants", broken)
    assert main(["--first", "5", "--seeds", "1"]) == 1
    assert "seed 5: BrokenInvariant: something (step 3" in capsys.readouterr().err
