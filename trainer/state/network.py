"""Choose the network interface that gloo uses to reach other machines."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys

from trainer import environment
from trainer.errors import module_logger

logger = module_logger(__name__)

_VARIABLE = "GLOO_SOCKET_IFNAME"
_HERE = ("localhost", "127.0.0.1", "::1")  # loopback addresses
_ADDRESS_OF = 0x8915  # SIOCGIFADDR on Linux


def choose_interface(launch: environment.Launch) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` if gloo's default interface cannot reach the other machines.

    gloo binds to the address to which the machine's host name resolves. On Debian and Ubuntu that
    is 127.0.1.1, and in many containers the name does not resolve. The other machines then cannot
    connect. If several interfaces are possible, a warning is logged and nothing is set.

    Args:
        launch: The processes and machines of the run.
    """
    one_machine = launch.local_world_size == launch.world_size
    master, address = launch.master_addr, _address(socket.gethostname())
    if one_machine or master in _HERE or environment.read(_VARIABLE) or not _is_loopback(address):
        return
    there, used = _interfaces(), None if master is None else source(master)
    if used in there:
        fitting = [there[used]]
    else:  # this machine is the master, or the interface is unknown: any interface is possible
        fitting = list(there.values())
    if len(fitting) == 1:
        os.environ[_VARIABLE] = fitting[0]  # noqa: TID251 - also for groups created later
        return
    logger.warning(
        "The name of this machine, %s, resolves to %s, which other machines cannot reach. Set %s "
        "to the interface that reaches them%s.",
        socket.gethostname(),
        address,
        _VARIABLE,
        f", one of {', '.join(fitting)}" if fitting else "",
    )


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if unknown."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _address(name: str) -> str:
    """Return the address of a host name; 127.0.0.1 if it does not resolve, as gloo does."""
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable_from(host: str) -> str | None:
    """Return the address at which `host` can reach this machine; None if unknown."""
    used = source(host)
    return None if used is None or _is_loopback(used) else used


def source(host: str) -> str | None:
    """Return the local address for connections to `host`; None if it is unreachable.

    Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, environment.DEFAULT_PORT))
        except (OSError, UnicodeError):  # no such host, or no route to it
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """Map the address of each network interface, except the loopback, to its name (Linux only)."""
    if sys.platform != "linux":
        return {}
    import fcntl

    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _ADDRESS_OF, request)
            except OSError:  # the interface has no IPv4 address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not _is_loopback(address):
                interfaces[address] = name
    return interfaces
