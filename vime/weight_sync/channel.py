"""Point-to-point messages between trainer ranks and the workers of one engine: Gloo between CPUs, NCCL between GPUs.

For weights that cannot be read where they are, because they lie on another node. The group is formed of exactly those
who send and receive, beside the process groups that Megatron and vLLM have made of their own processes. It lives until
one member fails or closes it: that ends the others' waiting with an error, and then a new one is formed.

A GPU's stream never waits for a message. Whatever a process enqueued after it, for another worker, would wait as well,
although the one who is to take that message may be waiting for the other: so the host looks whether it is done. It
looks at the clock too: NCCL's own deadline ends the process. (Its watchdog does that also when it finds a connection to
another node broken, before anybody here is asked; torch gives every message of a pair the pair's own stream, but of 32
in all, so beyond 32 workers per rank two pairs share one.)
"""

# Torch's stubs know the two backends by name only.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import datetime
import socket
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

# Whether a message between GPUs has passed is looked at without a pause for so many seconds, which 64 MiB take over a
# network, and then with pauses of so many: a pause costs as much as such a message takes over NVLink.
_SPIN, _LOOK = 2e-3, 1e-4


def address_towards(host: str) -> str:
    """This machine's own address on the way to ``host``."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # UDP: finds the route and sends nothing
        return probe.getsockname()[0]


class Meeting:
    """Where the members of a group find each other: a store that listens on ``host`` alone, on a free port."""

    def __init__(self, host: str, timeout: float) -> None:
        family = socket.getaddrinfo(host, 0)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.bind((host, 0))
            listening.listen(socket.SOMAXCONN)
            self.address = host, int(listening.getsockname()[1])
            # Torch listens on every interface unless it is given a socket.
            self.store = dist.TCPStore(
                *self.address,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=timeout),
                master_listen_fd=listening.detach(),
            )


def visit(host: str, port: int, timeout: float) -> dist.TCPStore:
    """The store of the :class:`Meeting` at this address, for whoever did not open it.

    Raises:
        RuntimeError: it did not answer within ``timeout`` seconds.
    """
    return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))


class Channel:
    """One member's end.

    Args:
        host, port: the :class:`Meeting`'s address.
        member, members: this one's number, and how many there are. The constructor returns when all have come.
        device: where the tensors are that are sent: "cpu", or this process's current CUDA device.
        timeout: seconds that forming the group, or one message, may take.

    Raises:
        RuntimeError: from every method: a member did not come, is gone, or is late.
    """

    def __init__(self, host: str, port: int, member: int, members: int, device: torch.device, timeout: float) -> None:
        self.device, self._timeout = device, timeout
        wait = datetime.timedelta(seconds=timeout)
        self._store = visit(host, port, timeout)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 10 * wait  # ours comes first
            self._open: Any = dist.ProcessGroupNCCL(self._store, member, members, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
            options._timeout = wait
            self._open = dist.ProcessGroupGloo(self._store, member, members, options)

    @property
    def _group(self) -> Any:
        if self._open is None:
            raise RuntimeError("the channel is closed")
        return self._open

    def begin_send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Send a contiguous tensor, after what is enqueued for it now. Its memory belongs to the message until
        :meth:`finish`; messages between the same two pass in the order in which they were begun."""
        return self._group.send([tensor], to, 0)

    def begin_receive(self, tensor: torch.Tensor, origin: int) -> dist.Work:
        """Fill a contiguous tensor with what ``origin`` sends, after what is enqueued for it now. Its memory belongs to
        the message until :meth:`finish`."""
        return self._group.recv([tensor], origin, 0)

    def finish(self, message: dist.Work) -> None:
        """Return when a message that was begun has passed."""
        if self.device.type == "cuda":
            started = time.monotonic()
            while not message.is_completed():
                waited = time.monotonic() - started
                if self._open is None:
                    raise RuntimeError("the channel was closed")
                if waited > self._timeout:
                    raise RuntimeError(f"a message has not passed within {self._timeout:g} s")
                time.sleep(0 if waited < _SPIN else _LOOK)  # 0: other threads send meanwhile
        message.wait()  # on a GPU for nothing: it has passed

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor; returns when its memory may be used again."""
        self.finish(self.begin_send(tensor, to))

    def receive(self, tensor: torch.Tensor, origin: int) -> None:
        """Fill a contiguous tensor with what ``origin`` sends; returns when it has come."""
        self.finish(self.begin_receive(tensor, origin))

    def send_bytes(self, data: bytes, to: int) -> None:
        """Send a message whose length the other side does not know."""
        self.send(torch.tensor([len(data)], device=self.device), to)
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device), to)

    def receive_bytes(self, origin: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.receive(size, origin)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self.receive(data, origin)
        return bytes(data.cpu().numpy())

    def close(self) -> None:
        """Leave; whoever waits for this member gets an error at once."""
        group, self._open = self._open, None
        if group is not None and self.device.type == "cuda":
            with suppress(RuntimeError):  # it is broken already
                group.abort()
        # Gloo's connections end with the last reference.
