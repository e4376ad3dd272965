"""Which errors of a tracker may pass, and how long to wait for that."""

import errno
import random

# What these say of a call is so the next time too. Some errors of networks are among their
# subclasses: those that are an OSError as well.
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
_own = random.SystemRandom()  # not the generator of the training


def may_pass(error: BaseException, what: str) -> bool:
    """Whether a call that raised is worth another try.

    A value that a service cannot take is not. An outage is: of a network, a server or a disk, and
    whatever else an SDK has errors of its own for.

    Args:
        error: what it raised.
        what: the method's name.
    """
    if isinstance(error, FileNotFoundError) and what in _FILES:
        return False
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return False
    return isinstance(error, OSError) or not isinstance(error, _FOR_GOOD)


def pause(attempt: int, first: float, longest: float) -> float:
    """How long to wait behind an attempt, in seconds: twice as long behind each, up to a limit.

    Up to a half of it is left to chance: runs that lost the same server should not all come back
    to it at once.

    Args:
        attempt: its number, from 1.
        first: the pause behind the first, in seconds.
        longest: the limit, in seconds.
    """
    return min(longest, first * 2.0 ** min(attempt - 1, 60)) * _own.uniform(0.5, 1.0)
