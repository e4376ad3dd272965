"""The network by which processes on several machines reach each other on the CPU."""

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
_HERE = ("localhost", "127.0.0.1", "::1")  # where only processes of this machine meet
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def choose_interface(launch: environment.Launch) -> None:
    """Have gloo use the network that leads to the other machines, where it would not.

    It takes the address of the machine's own name. That is 127.0.1.1 on Debian and Ubuntu, and none
    in many containers: the others are then waited for where they cannot come.
    """
    one_machine = launch.local_world_size == launch.world_size
    master, own = launch.master_addr, _address(socket.gethostname())
    if one_machine or master in _HERE or environment.read(_VARIABLE) or not _is_loopback(own):
        return
    there, used = _interfaces(), None if master is None else source(master)
    if used in there:
        fitting = [there[used]]
    else:  # on the machine that is named, by its name: any network may be the one
        fitting = list(there.values())
    if len(fitting) == 1:
        os.environ[_VARIABLE] = fitting[0]  # noqa: TID251 - also for groups that are made later
        return
    logger.warning(
        "The name of this machine, %s, means %s here, where no other machine reaches it. Export %s "
        "as the interface that leads to the others%s.",
        socket.gethostname(),
        own,
        _VARIABLE,
        f", one of {', '.join(fitting)}" if fitting else "",
    )


def _address(name: str) -> str:
    """What a name means; the loopback's address, as for gloo, where it means nothing."""
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable_from(host: str) -> str | None:
    """This machine's address for another one; None where it is not known."""
    used = source(host)
    return None if used is None or _is_loopback(used) else used


def source(host: str) -> str | None:
    """The address from which this machine would send to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, environment.DEFAULT_PORT))
        except (OSError, UnicodeError):  # there is no such name, or no way to it
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """The names of the interfaces by their addresses, without the loopback; Linux tells them."""
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
