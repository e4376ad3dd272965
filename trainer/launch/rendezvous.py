"""The private rendezvous of the processes of one machine.

torch's rendezvous listens on all addresses and unpickles what it receives. Several machines have to
use it, but one machine has nothing to negotiate. Its processes meet in files in the launcher's
folder, which only the user can read. Scripts that call `torch.distributed.init_process_group`
themselves find a store at ``MASTER_ADDR`` and ``MASTER_PORT``, which listens on the loopback
interface only.
"""

from __future__ import annotations

import socket

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # not in its stubs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from trainer import environment
from trainer.state.network import loopback_interface

BACKEND = "loopback"
_ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one agent: each attempt of its processes has its own stores.

    Args:
        parameters: torch's parameters. The endpoint ends with ``:port``; 0 selects a free port.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port = parameters.endpoint.rpartition(":")[2]
        self._attempt = 0
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the backend's name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes use this store instead of one created by rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return new stores for an attempt.

        Raises:
            ValueError: The port is invalid or in use.
        """
        self._server = None  # frees the port
        self._server = _serve(self._port)
        environment.store_path(self._server.port, self._attempt).mkdir()
        self._attempt += 1
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_ADDRESS, self._server.port))

    def is_closed(self) -> bool:
        """Return whether no more attempts are possible."""
        return False

    def set_closed(self) -> None:
        """Do nothing, since there are no other agents."""

    def num_nodes_waiting(self) -> int:
        """Return the number of agents that wait to take part."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._server = None
        return True


def _serve(port: str) -> TCPStore:
    try:
        listener = socket.create_server((_ADDRESS, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"Port {port} of {_ADDRESS} cannot be used: {error}. Choose another one, or leave it "
            "out to use a free one."
        ) from error
    return TCPStore(
        _ADDRESS,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def private_variables(folder: str) -> dict[str, str]:
    """Return the variables that restrict access to the processes to their own machine.

    Args:
        folder: The launcher's private folder.
    """
    variables = {environment.STORE: folder}
    interface = loopback_interface()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is not None and environment.read(name) is None:
            variables[name] = interface
    return variables


rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
