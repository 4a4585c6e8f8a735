import pytest

from reprise.app.turn.token_limits import answer_limit


@pytest.mark.parametrize(
    ("asked", "room", "beyond_window", "limit"),
    [
        (3, 100, 0, 3),
        (500, 100, 0, 100),
        (None, 100, 0, 100),
        (500, 100, 1000, 500),  # history makes room while the answer grows
        (5000, 100, 1000, 1000),
        (5000, 2000, 1000, 2000),  # what the window holds is always allowed
        (None, 100, 1000, 100),
        (None, 3, 1000, 50),  # an eighth of the window is left free by a truncation
        (None, -900, 1000, 50),
        (7, -900, 1000, 7),
    ],
)
def test_the_longest_answer(asked, room, beyond_window, limit):
    assert answer_limit(asked, room=room, window=400, beyond_window=beyond_window) == limit
