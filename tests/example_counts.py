"""Scales the number of examples of property tests with hypothesis' profile."""

from hypothesis import settings

_CI_EXAMPLES = 100  # examples of the profile `ci`: numbers in tests are its numbers


def examples(count: int) -> int:
    """Return how many examples a test tries in this profile that tries `count` in the profile `ci`."""
    return max(5, count * settings().max_examples // _CI_EXAMPLES)
