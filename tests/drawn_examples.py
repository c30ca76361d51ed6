"""How many examples a property test draws under the profile that ``tests/conftest.py`` loads."""

from hypothesis import settings

_USUAL_EXAMPLES = 100  # Hypothesis's own number, which the default profile keeps


def examples(number, **more):
    """Settings of a property test with this number of examples; the ``search`` profile draws more."""
    return settings(max_examples=number * settings.default.max_examples // _USUAL_EXAMPLES, **more)
