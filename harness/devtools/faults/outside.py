"""Faults from outside a sweep: damaged and foreign files among its results, damaged bases, an MLflow that fails."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.devtools.faults.damage import damage
from harness.devtools.faults.journal import Fault
from harness.records.paths import base_folders

ANSWER = '{"experiments": []}'


def put_record(fault: Fault, folder: Path, reference: Path, finished: list[str], missing: list[str]) -> Path | None:
    """Put the fault's file among the records of `folder`: its path, or None where the sweep is not at the point.

    `finished` are cells with an ok record, `missing` those without any; what is used leaves its list.
    """
    stem = f"foreign-{fault.id.replace('.', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    if fault.form == "garbage":
        path.write_bytes(hashlib.sha256(fault.id.encode()).digest() * 9)
    elif fault.form == "empty":
        path.write_bytes(b"")
    elif fault.form == "foreign":
        path.write_text('{"name": "somebody else", "scores": [1, 2, 3]}', encoding="utf-8")
    elif fault.form == "other":  # a sound record, of another sweep, in the place of a cell that has none yet
        if not missing:
            return None
        path = folder / f"{missing.pop()}.json"
        shutil.copyfile(reference / path.name, path)
    elif not finished:
        return None
    elif fault.form == "truncated":
        path = folder / f"{finished.pop()}.json"
        path.write_bytes(path.read_bytes()[:-300])
    else:
        path = folder / f"{finished.pop()}.parquet"
        path.unlink() if fault.form == "lost series" else damage(path, "truncated")
    return path


def snapshot(folder: Path) -> dict[Path, bytes]:
    """Every file under a folder with its bytes."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def restore(before: Mapping[Path, bytes], hit: Iterable[Path]) -> None:
    """Bring damaged files back, as somebody would who moves foreign files away and has copies of his own."""
    for path in hit:
        if path in before:
            path.write_bytes(before[path])
        else:
            path.unlink(missing_ok=True)


def damage_base(fault: Fault, results: Path) -> Path:
    """Damage the base of a round: its weights, or the record next to them."""
    (folder,) = base_folders(results)
    if fault.form == "recipe":
        (folder / "recipe.json").write_text('{"key": ', encoding="utf-8")
        return folder / "recipe.json"
    damage(folder / "model.safetensors", fault.form)
    return folder / "model.safetensors"


@contextmanager
def mlflow(form: str) -> Iterator[str]:
    """Address of a tracking server that refuses, fails, dies after its first answer, or never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    if form == "refused":
        server.close()
    elif form != "silent":  # which takes connections, for the system does, and answers none
        threading.Thread(target=_serve, args=(server, form), daemon=True).start()
    try:
        yield address
    finally:
        server.close()


def _serve(server: socket.socket, form: str) -> None:
    """Answer what asks, with an error or, once, with no experiments."""
    with suppress(OSError):  # closed
        while True:
            client, _ = server.accept()
            if form == "dies":
                server.close()
            with client, suppress(OSError):  # it did not wait for the answer
                client.settimeout(5.0)
                client.recv(65536)
                body = ANSWER if form == "dies" else json.dumps({"error_code": "INTERNAL_ERROR", "message": "down"})
                head = "200 OK" if form == "dies" else "500 Internal Server Error"
                lines = f"HTTP/1.1 {head}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                client.sendall(f"{lines}Connection: close\r\n\r\n{body}".encode())
