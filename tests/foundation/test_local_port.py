"""A port is told free or taken, in one line."""

from __future__ import annotations

import socket

import pytest

from harness.foundation.local_port import check_port


def test_a_port_that_another_server_has_is_refused_and_free_again_afterwards() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError) as error:
            check_port(port)
    assert str(error.value) == f"port {port} cannot be used: Address already in use; choose another with --port"
    check_port(port)
