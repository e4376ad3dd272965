"""Distributed runs: collectives, checks of collectives, step sync, error reporting, watchdog."""
