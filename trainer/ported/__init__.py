"""What code written for Lightning brings along: refused with what to use, or understood.

Nothing that a user has written for it is left out in silence.
"""
