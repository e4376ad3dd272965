"""Which errors of a tracker are worth a retry, and how long to wait before it."""

import errno
import random

# A call that raised one of these would raise it again, except for network errors, which may be
# subclasses of these but are an OSError as well.
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
    """Return whether a call that raised is worth a retry.

    A call with a value that the service cannot take is not. One that fails in an outage of a
    network, a server or a disk is, and so is one that raises an error defined by an SDK.

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
    """Return how long to wait after an attempt, in seconds: twice as long each time, up to a limit.

    Up to half of the pause is random: runs that lost the same server should not all return to it at
    once.

    Args:
        attempt: the number of the attempt, from 1.
        first: the pause after the first attempt, in seconds.
        longest: the limit, in seconds.
    """
    return min(longest, first * 2.0 ** min(attempt - 1, 60)) * _own.uniform(0.5, 1.0)
