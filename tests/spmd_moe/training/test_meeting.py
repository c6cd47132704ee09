"""Where ranks meet: what is no store is left within the timeout, and said once."""

import os
import socket
import time
from collections.abc import Iterator
from threading import Thread

import pytest
import torch.distributed as dist

from spmd_moe.training import meeting
from spmd_moe.training.errors import RankFailed, Unusable
from spmd_moe.training.world import World, joined

SAYS = {"nothing": b"", "another thing": b"HTTP/1.1 400 Bad Request\r\n\r\n"}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a program that accepts connections, and is no store."""
    with socket.create_server((meeting.HOST, 0)) as listener:
        accepted: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                accepted.append(connection)
                connection.sendall(SAYS[request.param])

        Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        for connection in accepted:
            connection.close()


@pytest.mark.parametrize("server", SAYS, indirect=True)
def test_a_port_without_a_store(
    server: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_GRACE", 0.5)
    world = World(1, 2, meeting.HOST, server)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=f"did not meet the others at 127.0.0.1:{server}"):
        with joined(world, timeout=0.5):
            raise AssertionError("there is nobody to meet")
    assert time.monotonic() - began < 20
    assert not dist.is_initialized()
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"  # no trace of frames, and stderr is back


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_is_none(rank: int) -> None:
    world = World(rank, 2, "x" * 300, 29500)
    with pytest.raises(RankFailed, match="did not meet the others at xxx"):
        with joined(world, timeout=0.5):
            raise AssertionError("there is nobody to meet")


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(Unusable, match=r"GLOO_SOCKET_IFNAME is 'none0' .*: name one of"):
        with joined(World(0, 1), timeout=5.0):
            raise AssertionError("it was not looked at")
