"""Retries of tracker calls: which errors are retried, and the backoff between attempts."""

import errno
import random

# Errors that a retry would raise again. Network errors may be subclasses of these, but are also an
# OSError, and are retried.
_FOR_GOOD = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_FILES = ("log_artifact", "log_model")
_own = random.SystemRandom()  # not the RNG of the training


def may_pass(error: BaseException, what: str) -> bool:
    """Return whether to retry a call that raised.

    A call with an invalid value is not retried. A call that fails because of a network, server or
    disk is retried, and so is one that raises an error class of an SDK.

    Args:
        error: the error that the call raised.
        what: the name of the method.
    """
    if isinstance(error, FileNotFoundError) and what in _FILES:
        return False
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return False
    return isinstance(error, OSError) or not isinstance(error, _FOR_GOOD)


def pause(attempt: int, first: float, longest: float) -> float:
    """Return the pause after an attempt, in seconds: exponential backoff with jitter.

    It doubles with each attempt, up to a limit. Up to half of it is random, so that many runs do
    not return to the same server at once.

    Args:
        attempt: the number of the attempt, from 1.
        first: the pause after the first attempt, in seconds.
        longest: the limit, in seconds.
    """
    return min(longest, first * 2.0 ** min(attempt - 1, 60)) * _own.uniform(0.5, 1.0)
