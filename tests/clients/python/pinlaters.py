"""A client of PinLater's own interface: stubs of thrift/pinlater.thrift without our fields.

PYTHONPATH=gen python pinlaters.py 9010 mail
"""

import sys

from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TFramedTransport

from pinlater import PinLater, ttypes
from pinlater.ttypes import (
    PinLaterCheckpointJobRequest,
    PinLaterCheckpointJobsRequest,
    PinLaterDequeueRequest,
    PinLaterEnqueueRequest,
    PinLaterJob,
    PinLaterJobAckInfo,
    PinLaterJobAckRequest,
    PinLaterJobState,
    PinLaterLookupJobRequest,
    RequestContext,
)

EXTENDED = (
    "PinLaterDequeueRequest",
    "PinLaterDequeueMetadata",
    "PinLaterJobAckInfo",
    "PinLaterCheckpointJobRequest",
)
# a struct's last field here, by its id
print(*(f"{name} {getattr(ttypes, name).thrift_spec[-1][0]}" for name in EXTENDED))

port, queue = sys.argv[1:]
connection = TFramedTransport(TSocket("127.0.0.1", int(port)))
service = PinLater.Client(TBinaryProtocol(connection))
connection.open()
me = RequestContext(source="pinlaters:python")


def claim() -> str:
    claimed = service.dequeueJobs(me, PinLaterDequeueRequest(queue, limit=10))
    descriptor: str
    [(descriptor, body)] = claimed.jobs.items()
    about = claimed.jobMetadata[descriptor]
    attempts = f"{about.attemptsRemaining} of {about.attemptsAllowed} attempts"
    print(f"claimed {body.decode()}, {attempts}")
    return descriptor


service.createQueue(me, queue)
service.enqueueJobs(me, PinLaterEnqueueRequest(queue, [PinLaterJob(b"step 1")]))
descriptor = claim()
step = PinLaterCheckpointJobRequest(
    descriptor, newBody="step 2", moveToPending=True, prependCustomStatus="half "
)
service.checkpointJobs(me, PinLaterCheckpointJobsRequest(queue, [step]))
assert claim() == descriptor
done = PinLaterJobAckInfo(descriptor, appendCustomStatus="done")
service.ackDequeuedJobs(me, PinLaterJobAckRequest(queue, jobsSucceeded=[done]))
[found] = service.lookupJobs(me, PinLaterLookupJobRequest([descriptor])).values()
state = PinLaterJobState._VALUES_TO_NAMES[found.jobState]
claimer = "pinlaters:python" if ":pinlaters:python:" in found.claimDescriptor else "?"
print(f"{state} {found.customStatus!r} claimed by {claimer}")
connection.close()
