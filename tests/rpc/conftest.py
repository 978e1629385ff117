"""Apache Thrift's own Python library, with code that its compiler makes of the interface."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pinlaterd.rpc.interface import INTERFACE_FILE


@pytest.fixture(scope="session")
def apache(tmp_path_factory: pytest.TempPathFactory, program_path) -> SimpleNamespace:
    """`service` and `types` as generated, `write(call)` and `read(reply)` of whole messages, in
    binary or compact."""
    compiler = program_path("thrift", debian_package="thrift-compiler")
    transport = pytest.importorskip("thrift.transport.TTransport")
    protocol = pytest.importorskip("thrift.protocol.TBinaryProtocol")
    compact = pytest.importorskip("thrift.protocol.TCompactProtocol").TCompactProtocol
    folder = tmp_path_factory.mktemp("apache")
    subprocess.run(
        [compiler, "--gen", "py", "-out", folder, INTERFACE_FILE.resolve()],
        check=True,
        capture_output=True,
        timeout=60,
    )
    sys.path.insert(0, str(folder))
    try:
        service = importlib.import_module("pinlater.PinLater")
        types = importlib.import_module("pinlater.ttypes")
    finally:
        sys.path.remove(str(folder))

    def write(method: str, *arguments: object, strict: bool = True, seqid: int = 7) -> bytes:
        buffer = transport.TMemoryBuffer()
        client = service.Client(protocol.TBinaryProtocol(buffer, strictWrite=strict))
        client._seqid = seqid
        getattr(client, f"send_{method}")(*arguments)
        return bytes(buffer.getvalue())

    def write_compact(method: str, *arguments: object, seqid: int = 7) -> bytes:
        buffer = transport.TMemoryBuffer()
        client = service.Client(compact(buffer))
        client._seqid = seqid
        getattr(client, f"send_{method}")(*arguments)
        return bytes(buffer.getvalue())

    def read_compact(method: str, reply: bytes) -> object:
        client = service.Client(compact(transport.TMemoryBuffer(reply)))
        return getattr(client, f"recv_{method}")()

    def read(method: str, reply: bytes) -> object:
        client = service.Client(protocol.TBinaryProtocol(transport.TMemoryBuffer(reply)))
        return getattr(client, f"recv_{method}")()

    def serve(message: bytes, handler: object) -> bytes:
        answer = transport.TMemoryBuffer()
        service.Processor(handler).process(
            protocol.TBinaryProtocol(transport.TMemoryBuffer(message)),
            protocol.TBinaryProtocol(answer),
        )
        return bytes(answer.getvalue())

    return SimpleNamespace(
        service=service,
        types=types,
        write=write,
        read=read,
        serve=serve,
        unknown_method=pytest.importorskip("thrift.Thrift").TApplicationException,
        write_compact=write_compact,
        read_compact=read_compact,
    )
