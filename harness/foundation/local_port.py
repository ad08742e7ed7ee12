"""Ports of this machine, asked whether they are free before a server starts."""

from __future__ import annotations

import socket


def check_port(port: int) -> None:
    """Raises ValueError where nothing can be served at the port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"port {port} cannot be used: {reason}; choose another with --port") from error
