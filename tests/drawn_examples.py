"""How many examples a property test draws under the profile that ``tests/conftest.py`` loads."""

from typing import Any

from hypothesis import settings

_USUAL_EXAMPLES = 100  # Hypothesis's own number, which the default profile keeps


def examples(number: int, **more: Any) -> settings:
    """Settings of a property test that follow the loaded profile.

    Args:
        number: Examples under the default profile; the ``search`` profile draws more in proportion.
        more: Further settings of Hypothesis.
    """
    return settings(max_examples=number * settings.default.max_examples // _USUAL_EXAMPLES, **more)
