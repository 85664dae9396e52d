"""On which addresses a process and all that it has started listen."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess

import psutil


def exposed(root: psutil.Process) -> list[str]:
    """Every socket of ``root`` and its descendants that another machine could reach, with who holds it, in words."""
    found = []
    for process in (root, *root.children(recursive=True)):
        try:
            sockets = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            # Ray's processes write their titles over their command lines, padded.
            found += [
                f"{c.laddr.ip} port {c.laddr.port}: {' '.join(process.cmdline()).strip()[:200]}"
                for c in sockets
                if not _is_loopback(c.laddr.ip)
            ]
        except psutil.NoSuchProcess:
            continue
    return found


def outward_name() -> list[str]:
    """Words before a command that give it a host name which stands for an address that other machines reach, as on most
    machines outside of containers: what Gloo and others listen on when nobody tells them. Empty where that takes rights
    or a network that are not here."""
    addresses = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not _is_loopback(address.address)
    ]
    unshare = shutil.which("unshare")
    if not addresses or not unshare:
        return []
    words = [unshare, "--uts", "sh", "-c", f'hostname {addresses[0]} && exec "$@"', "sh"]
    tried = subprocess.run([*words, "true"], capture_output=True, check=False, timeout=30)
    return [] if tried.returncode else words


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None  # ::ffff:127.0.0.1
    return (mapped or ip).is_loopback
