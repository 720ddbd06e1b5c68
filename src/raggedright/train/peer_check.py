"""Refuses a process group in which a process of another user holds a connection of this rank.

Ranks on one machine talk over loopback, and gloo's listener accepts any process that sends the number of a connection.
Another user of the machine who is faster than a late rank would take its place, and ranks unpickle what they receive.
gloo connects all pairs of ranks while the group is formed, so right after that every connection that will carry
pickles exists, and Linux knows the user at its other end. (NCCL connects later, and its connections begin with a random
number that ranks share through the launcher's private file.)

This defends against other users of the machine, not against processes of the same user, who can do anything in any
case. It knows nothing of other machines: the ranks of a Ray cluster need a trusted network (docs/clusters.md).
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # of all TCP sockets of the machine
ESTABLISHED = "01"
WAIT_SECONDS = 5.0  # for the other end to accept a connection; the tables may also miss an entry that just changed
POLL_SECONDS = 0.05
Address = tuple[IPv4Address | IPv6Address, int]


class Connection(NamedTuple):
    """The two ends of a TCP connection, as its socket sees them."""

    near: Address
    far: Address


def foreign_peer() -> str | None:
    """What is wrong with a loopback connection of this process whose other end is not this user's; None if all are."""
    if sys.platform != "linux":
        return None
    unknown, deadline = {*_loopback_connections()}, time.monotonic() + WAIT_SECONDS
    while unknown:
        users = dict(_established_sockets())
        for connection in [*unknown]:
            user = users.get(Connection(connection.far, connection.near))
            if user == os.geteuid():
                unknown.remove(connection)
            elif user is not None:
                return _text(connection, f"a process of user {user}")
        if unknown and time.monotonic() > deadline:
            return _text(unknown.pop(), "an unknown process")
        time.sleep(POLL_SECONDS if unknown else 0)
    return None


def _text(connection: Connection, process: str) -> str:
    (near, near_port), (far, far_port) = connection
    return (
        f"{process}, not a rank of this run, is connected from {far} port {far_port} to port {near_port} of this rank "
        f"on {near}; nothing of it was unpickled; end that process, and run the same command again"
    )


def _loopback_connections() -> Iterator[Connection]:
    """The TCP connections of this process that stay on this machine."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since, or not connected
            if not os.readlink(file).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as opened:
                if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
                    near, far = (_address(*end[:2]) for end in (opened.getsockname(), opened.getpeername()))
                    if far[0].is_loopback:
                        yield Connection(near, far)


def _established_sockets() -> Iterator[tuple[Connection, int]]:
    """The established TCP sockets of the machine that a process holds, and the user of each.

    One that no process holds has no inode: the other end has not accepted it yet, or has closed it.
    """
    for table in TABLES:
        for line in table.read_text().splitlines()[1:]:
            _, near, far, state, _, _, _, user, _, inode, *_ = line.split()
            if state == ESTABLISHED and inode != "0":
                yield Connection(_parsed(near), _parsed(far)), int(user)


def _parsed(text: str) -> Address:
    """An address and port of the tables: 32-bit words in the machine's byte order, in hexadecimal."""
    words, port = text.split(":")
    data = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    return _address(socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data), int(port, 16))


def _address(host: str, port: int) -> Address:
    """An IPv6 socket reaches an IPv4 one by a mapped address, which is the IPv4 address."""
    ip = ip_address(host)
    return (isinstance(ip, IPv6Address) and ip.ipv4_mapped) or ip, port
