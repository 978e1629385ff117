"""What Finagle does: it opens each connection with a call that only its own servers know, and goes
on, without tracing, after exactly a TApplicationException of an unknown method.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.protocol.TCompactProtocol import TCompactProtocol
from thrift.Thrift import TApplicationException, TMessageType
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TFramedTransport

from tests.clients.languages import Workshop
from tests.deployment import Deployment

pytestmark = pytest.mark.service

OPENING = "__can__finagle__trace__v3__"
FORMS = {
    "framed binary": (TFramedTransport, TBinaryProtocol),
    "unframed binary": (TBufferedTransport, TBinaryProtocol),
    "framed compact": (TFramedTransport, TCompactProtocol),
}


@pytest.fixture(scope="module")
def stubs(workshop: Workshop) -> ModuleType:
    sys.path.insert(0, str(workshop.generate("py")))
    try:
        return importlib.import_module("pinlater.PinLater")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("form", FORMS)
def test_a_connection_goes_on_after_the_opening_call(service: Deployment, stubs: ModuleType, form):
    wrap, protocol_of = FORMS[form]
    transport = wrap(TSocket("127.0.0.1", service.port))
    protocol = protocol_of(transport)
    transport.open()

    # The argument is ConnectionOptions, a struct without fields.
    protocol.writeMessageBegin(OPENING, TMessageType.CALL, 0)
    protocol.writeStructBegin("ConnectionOptions")
    protocol.writeFieldStop()
    protocol.writeStructEnd()
    protocol.writeMessageEnd()
    transport.flush()
    head = protocol.readMessageBegin()
    refusal = TApplicationException()
    refusal.read(protocol)
    protocol.readMessageEnd()

    assert head == (OPENING, TMessageType.EXCEPTION, 0)
    assert refusal.type == TApplicationException.UNKNOWN_METHOD
    client = stubs.Client(protocol)
    me = stubs.RequestContext("finagle")
    client.createQueue(me, "finagle")
    assert "finagle" in client.getQueueNames(me)
    transport.close()
