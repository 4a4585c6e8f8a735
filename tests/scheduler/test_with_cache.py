"""Tests the real scheduler on the real cache manager, in a loop like the engine's, over a pool that records what it
holds."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.make_policy import POLICIES, make_policy
from reprise.scheduler.predictor import QuantilePredictor
from reprise.scheduler.scheduler import Scheduler
from reprise.scheduler.sequence import Sequence
from tests.cache.pool_model import PoolModel, make_manager
from tests.conftest import greedy, make_sequence
from tests.example_counts import examples
from tests.scheduler.test_scheduler import make_cost


@dataclass
class Session:
    """A client: sends a turn, reads the answer or goes away, sends the next."""

    name: str
    token_ids: list[int]
    turns: int
    copies: int


@dataclass
class Server:
    model: PoolModel
    scheduler: Scheduler
    rng: random.Random
    limit: int  # rows of HBM
    now: float = 0.0
    opened: int = 0
    live: dict[str, tuple[Sequence, Session]] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def submit(self, session: Session) -> None:
        """One turn, in as many copies as the client asks for; the first copy carries the session on."""
        session.turns -= 1
        prompt = session.token_ids + self.rng.choices([0, 1], k=self.rng.randint(1, 90))
        prompt = prompt[: self.limit - 1]
        for copy in range(session.copies):
            self.opened += 1
            answer = min(self.rng.choice([1, 5, 40]), self.limit - len(prompt))
            sequence = make_sequence(
                f"{self.opened:03}/{copy}",
                prompt,
                session_id=session.name,
                arrived_s=self.now,
                sampling=greedy(max_tokens=answer),
            )
            sequence.token_ids = self.model.open(sequence.request_id, prompt, session=session.name)
            self.scheduler.add(sequence)
            self.live[sequence.request_id] = sequence, session

    def end(self, sequence: Sequence, num_tokens: int) -> None:
        _, session = self.live.pop(sequence.request_id)
        self.scheduler.remove(sequence)
        self.model.close(sequence.request_id, num_tokens, self.now)
        if session.turns and not any(other is session for _, other in self.live.values()):
            session.token_ids = sequence.token_ids[:num_tokens]
            self.submit(session)

    def step(self) -> None:
        self.now += 1.0
        manager = self.model.manager
        schedule = self.scheduler.schedule(self.now)
        assert schedule.chunks or schedule.preempted, "nothing moves"
        for chunk in schedule.chunks:
            request_id = chunk.sequence.request_id
            assert chunk.sequence.computed_tokens == self.model.contexts[request_id].rows.computed
            if request_id not in self.reported:
                self.reported.add(request_id)
                report = manager.requests.report(request_id)
                assert report.hbm_tokens == chunk.sequence.computed_tokens
                assert sum(report.miss_reasons.values()) == report.computed_tokens
        for chunk in schedule.chunks:
            self.model.forward(chunk.sequence.request_id, chunk.num_tokens)
        lasts = [chunk.sequence for chunk in schedule.chunks if chunk.is_last]
        for chunk in schedule.chunks:
            self.model.save_and_commit(chunk.sequence.request_id, chunk.num_tokens)
            chunk.sequence.computed_tokens += chunk.num_tokens
        self.check()
        for sequence in lasts:
            sequence.token_ids.append(self.rng.randrange(2))
            if sequence.output_tokens == sequence.sampling.max_tokens:
                self.end(sequence, sequence.computed_tokens)
        self.check()

    def interrupt(self) -> None:
        """A client goes away, or a stop string is found a few tokens back; maybe while the request waits."""
        sequence, _ = self.rng.choice(list(self.live.values()))
        cut = self.rng.choice([0, 0, 3, 40])
        self.end(sequence, max(1, len(sequence.token_ids) - cut))
        self.check()

    def check(self) -> None:
        self.model.check()
        running = {sequence.request_id for sequence in self.scheduler.running}
        assert running == {name for name, context in self.model.contexts.items() if context.rows.pages}
        assert running | set(self.scheduler.upcoming().members) == set(self.live)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("page_size", [32, 64, 256])
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**16),
    num_pages=st.integers(3, 12),
    sessions=st.integers(1, 6),
    max_seqs=st.integers(1, 5),
    step_tokens=st.integers(8, 120),
    chunked=st.booleans(),
    policy=st.sampled_from(["lru", "fifo"]),
    order=st.sampled_from(POLICIES),
    reuse=st.integers(0, 5).map(bool),
)
def test_conversations_in_a_memory_too_small_for_them(
    page_size, seed, num_pages, sessions, max_seqs, step_tokens, chunked, policy, order, reuse
):
    rng = random.Random(seed)
    manager = make_manager(
        num_pages=num_pages, page_size=page_size, contiguous=rng.random() < 0.5, reuse=reuse, policy=policy
    )
    predictor = QuantilePredictor(quantile=0.5)
    scheduler = Scheduler(
        cache=manager.view,
        policy=make_policy(order, cache=manager.view, predictor=predictor, patience=8.0, window=3, scores=True),
        predictor=predictor,
        cost=make_cost(),
        limits=SchedulerLimits(
            max_seqs=max_seqs,
            max_queued=100,
            step_tokens=step_tokens,
            lone_step_tokens=2 * step_tokens,
            itl_target_s=rng.choice([0.0, 0.05, None]),
            least_chunk_tokens=rng.choice([1, 40]),
            chunked_prefill=chunked,
        ),
    )
    server = Server(PoolModel(manager), scheduler, rng, limit=num_pages * page_size)
    system_prompt = rng.choices([0, 1], k=rng.choice([0, 40, 300]))
    for number in range(sessions):
        text = system_prompt[: server.limit // 2]
        server.submit(Session(f"s{number % 4}", text, turns=rng.randint(1, 3), copies=rng.choice([1, 1, 3])))
    for _ in range(3000):
        if not server.live:
            break
        server.step()
        if server.live and rng.random() < 0.05:
            server.interrupt()
    assert not server.live, "somebody never finished"
    assert manager.num_leases == 0
    assert not scheduler.has_work()
    assert manager.tiers.pages.num_free + manager.tiers.pages.num_cached == num_pages
    found, computed = manager.stats.prompt_tokens["hbm"], manager.stats.prompt_tokens["computed"]
    assert computed == manager.stats.miss_tokens.total()
    assert reuse or found == 0
