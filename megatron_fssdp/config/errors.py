"""The exception type for input that a user can correct."""

_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class ConfigurationError(ValueError):
    """Invalid input from a user: settings, arguments, files, or a model that is not supported.

    The message is always one line, because control characters (for example in file names) are written as
    escapes. The launcher and the command line print it without a traceback and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.translate(_ESCAPES))
