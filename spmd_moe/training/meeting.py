"""Where ranks meet: every socket listens on the address that was chosen, and no other.

Left to themselves, torch's store listens on every interface and gloo on the address that
the name of the machine has. Neither asks who connects.
"""

import ipaddress
import os
import socket
import stat
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from spmd_moe.training.errors import Unusable

HOST = "127.0.0.1"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_GRACE = 5.0  # seconds more for torch to say itself that nobody answers
_INTERFACE = "GLOO_SOCKET_IFNAME"


def listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only; port 0 is a free one."""
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family)


def check_port(port: int) -> None:
    """Raise Unusable if nothing can listen on `port`."""
    try:
        listening(HOST, port).close()
    except OSError as error:
        raise Unusable(
            f"--port {port} cannot be used ({error}); give another, or none to have a free "
            "one chosen"
        ) from None


def store_of(address: str, port: int, timeout: float, *, hosts: bool) -> Any:
    """Return the store at `address`, which this process has if it `hosts` it."""
    if hosts:
        return host_store(listening(address, port), timeout)
    return _connected(address, port, timeout)


def _connected(address: str, port: int, timeout: float) -> Any:
    """Connect to a store. Torch waits forever for one that accepts and does not answer."""
    watch = threading.Timer(timeout + _GRACE, _hang_up, (port,))
    watch.daemon = True
    watch.start()
    try:
        return cast(Any, dist).TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=timeout)
        )
    finally:
        watch.cancel()


def _hang_up(port: int) -> None:
    """Shut the connections to this port, so that who waits for an answer gets an error."""
    for fd in map(int, os.listdir("/dev/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                if one.family in _INTERNET and one.getpeername()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed by now, or not connected
            continue


@contextmanager
def without_torchs_log() -> Generator[None]:
    """Drop what torch's C++ writes to stderr: a trace of frames for each failed attempt.

    What went wrong is in the error that it raises.
    """
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - it was closed
        yield
        return
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def host_store(listener: socket.socket, timeout: float) -> Any:
    """Make the store at which ranks meet, on a socket that listens already."""
    address, port = listener.getsockname()[:2]
    return cast(Any, dist).TCPStore(
        address, port, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=timeout), master_listen_fd=listener.detach(),
    )  # fmt: skip


@contextmanager
def on_loopback(address: str) -> Generator[None]:
    """Let gloo use the loopback interface if the ranks meet there; else as it is set up."""
    names = {name for _, name in socket.if_nameindex()}
    given = os.environ.get(_INTERFACE)
    if given is not None and not names.issuperset(given.split(",")):
        raise Unusable(
            f"{_INTERFACE} is {given!r} in the environment, and this machine has the "
            f"interfaces {', '.join(sorted(names))}: name one of them or unset it"
        )
    name = _loopback_of(address) if given is None else None
    if name is not None:
        os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        if name is not None:
            del os.environ[_INTERFACE]


def _loopback_of(address: str) -> str | None:
    try:
        found = str(socket.getaddrinfo(address, None)[0][4][0])
    except (OSError, UnicodeError):
        return None  # whoever connects to it says what is wrong
    if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
