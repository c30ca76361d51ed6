"""The one exception type for input a user can correct."""

_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class ConfigurationError(ValueError):
    """Bad input from a user: settings, arguments, files or a model that cannot be served.

    The message says what was wrong, what was got, what was wanted and the next
    step. It is one line whatever a file or a file's name holds: control characters are
    written as escapes. Launcher and command line print it without a traceback and
    exit with code 2; it is raised before any process group is used, on every rank.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.translate(_ESCAPES))
