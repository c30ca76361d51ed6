"""The exception type for input that a user can correct, and which rank prints it."""

import os
import time

_FIRST_RANK_S = 60.0
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class ConfigurationError(ValueError):
    """Invalid input from a user: settings, arguments, files, or a model that is not supported.

    The message is always one line, because control characters (for example in file names) are written as
    escapes. The launcher and the command line print it without a traceback and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.translate(_ESCAPES))


def await_first_rank() -> None:
    """Let rank 0 print an error that all ranks have, before this rank prints it.

    torchrun ends all ranks when one ends, and rank 0 may come to the error later than this one. If it prints,
    this rank is ended while it waits here. If rank 0 does not have the error, this rank goes on after a
    minute.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_FIRST_RANK_S)
