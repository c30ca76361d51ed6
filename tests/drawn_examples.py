"""Seeds, and how many examples a property test draws under the profile that ``tests/conftest.py`` loads."""

from hypothesis import settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)
_USUAL_EXAMPLES = 100  # Hypothesis's own number, which the default profile keeps


def examples(number, **more):
    """Settings of a property test with this number of examples; the ``search`` profile draws more."""
    return settings(max_examples=number * settings.default.max_examples // _USUAL_EXAMPLES, **more)
