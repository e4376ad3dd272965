"""Choose the network interface through which CPU processes reach other machines."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
import sys

from trainer import environment

logger = logging.getLogger(__name__)

_VARIABLE = "GLOO_SOCKET_IFNAME"
_HERE = ("localhost", "127.0.0.1", "::1")  # addresses that only this machine reaches
_ADDRESS_OF = 0x8915  # SIOCGIFADDR on Linux


def choose_interface(launch: environment.Launch) -> None:
    """Make gloo use the interface that reaches the other machines, if its default would not.

    gloo binds to the address of the machine's host name. On Debian and Ubuntu this is 127.0.1.1,
    and in many containers there is none: the other machines then cannot connect.
    """
    one_machine = launch.local_world_size == launch.world_size
    master, own = launch.master_addr, _address(socket.gethostname())
    if one_machine or master in _HERE or environment.read(_VARIABLE) or not _is_loopback(own):
        return
    there, used = _interfaces(), None if master is None else source(master)
    if used in there:
        fitting = [there[used]]
    else:  # this is the master, or the interface is unknown: any may be the right one
        fitting = list(there.values())
    if len(fitting) == 1:
        os.environ[_VARIABLE] = fitting[0]  # noqa: TID251 - also for groups created later
        return
    logger.warning(
        "The name of this machine, %s, resolves to %s, which other machines cannot reach. Set %s "
        "to the interface that reaches them%s.",
        socket.gethostname(),
        own,
        _VARIABLE,
        f", one of {', '.join(fitting)}" if fitting else "",
    )


def loopback_interface() -> str | None:
    """Return the name of the interface that reaches only this machine; None if unknown."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _address(name: str) -> str:
    """Return the address of a host name; if it does not resolve, the loopback's, as gloo does."""
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable_from(host: str) -> str | None:
    """Return this machine's address as another machine can reach it; None if unknown."""
    used = source(host)
    return None if used is None or _is_loopback(used) else used


def source(host: str) -> str | None:
    """Return the address from which this machine would send to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, environment.DEFAULT_PORT))
        except (OSError, UnicodeError):  # no such host, or no route to it
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """Return the interfaces' names by address, without the loopback; empty except on Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _ADDRESS_OF, request)
            except OSError:  # it has no address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not _is_loopback(address):
                found[address] = name
    return found
