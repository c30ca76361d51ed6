"""The one exception type for input a user can correct."""


class ConfigurationError(ValueError):
    """Bad input from a user: settings, arguments, files or a model that cannot be served.

    The message says what was wrong, what was got, what was wanted and the next
    step, on one line. Launcher and command line print it without a traceback and
    exit with code 2; it is raised before any process group is used, on every rank.
    """
