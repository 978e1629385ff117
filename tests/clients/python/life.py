"""The whole life of a job, with Apache Thrift's own library for Python.

thrift --gen py -out gen thrift/pinlater.thrift
PYTHONPATH=gen python life.py 9010 mail framed binary
"""

import sys

from thrift.protocol.TBinaryProtocol import TBinaryProtocol, TBinaryProtocolAccelerated
from thrift.protocol.TCompactProtocol import TCompactProtocol, TCompactProtocolAccelerated
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TFramedTransport

from pinlater import PinLater
from pinlater.constants import CONTINUATION_END, CONTINUATION_START
from pinlater.ttypes import (
    PinLaterCheckpointJobRequest,
    PinLaterCheckpointJobsRequest,
    PinLaterDequeueRequest,
    PinLaterEnqueueRequest,
    PinLaterException,
    PinLaterGetJobCountRequest,
    PinLaterJob,
    PinLaterJobAckInfo,
    PinLaterJobAckRequest,
    PinLaterJobState,
    PinLaterLookupJobRequest,
    PinLaterScanJobsRequest,
    RequestContext,
)

TRANSPORTS = {"framed": TFramedTransport, "unframed": TBufferedTransport}
PROTOCOLS = {
    "binary": TBinaryProtocol,
    "binary-accelerated": TBinaryProtocolAccelerated,
    "compact": TCompactProtocol,
    "compact-accelerated": TCompactProtocolAccelerated,
}

port, queue, transport, protocol = sys.argv[1:]
connection = TRANSPORTS[transport](TSocket("127.0.0.1", int(port)))
service = PinLater.Client(PROTOCOLS[protocol](connection))
connection.open()
me = RequestContext(source="life:python")

service.createQueue(me, queue)
print("created" if queue in service.getQueueNames(me) else "missing")

jobs = [
    PinLaterJob(bytes([0x00, 0xFF, 0x0A, 0x80])),
    PinLaterJob("grüße, 世界".encode(), numAttemptsAllowed=5, customStatus="né; "),
    PinLaterJob(b"step 1", priority=3),
]
descriptors = service.enqueueJobs(me, PinLaterEnqueueRequest(queue, jobs)).jobDescriptors
raw, text, steps = descriptors

claimed = service.dequeueJobs(me, PinLaterDequeueRequest(queue, limit=10))
for descriptor in descriptors:
    about = claimed.jobMetadata[descriptor]
    attempts = f"{about.attemptsRemaining} of {about.attemptsAllowed} attempts"
    print("claimed", claimed.jobs[descriptor].hex(), attempts, f"{about.claimTimeoutSeconds} s")

# Acks and checkpoints name the claim: they apply only as long as it holds.
claims = {job: about.claimDescriptor for job, about in claimed.jobMetadata.items()}
done = PinLaterJobAckInfo(raw, "sent ✓", claimDescriptor=claims[raw])
in_an_hour = PinLaterJobAckInfo(text, "später", 3_600_000, claims[text])
service.ackDequeuedJobs(me, PinLaterJobAckRequest(queue, [done], [in_an_hour]))

# The third job saves how far it got, and goes back to the queue.
saved = PinLaterCheckpointJobRequest(
    steps,
    newBody="step 2",
    moveToPending=True,
    prependCustomStatus="½",
    claimDescriptor=claims[steps],
)
service.checkpointJobs(me, PinLaterCheckpointJobsRequest(queue, [saved]))
again = service.dequeueJobs(me, PinLaterDequeueRequest(queue, limit=10)).jobs
print("claimed again", again[steps].decode())
service.ackDequeuedJobs(me, PinLaterJobAckRequest(queue, [PinLaterJobAckInfo(steps)]))

found = service.lookupJobs(me, PinLaterLookupJobRequest(descriptors, includeBody=True))
for descriptor in descriptors:
    info = found[descriptor]
    state = PinLaterJobState._VALUES_TO_NAMES[info.jobState]
    print("found", state, f"{info.attemptsRemaining} left", info.body.hex(), info.customStatus)
print("delayed", found[text].runAfterTimestampMillis - found[text].updatedAtTimestampMillis, "ms")

scanned, continuation = 0, CONTINUATION_START
while continuation != CONTINUATION_END:
    request = PinLaterScanJobsRequest(
        queue, PinLaterJobState.SUCCEEDED, continuation=continuation, limit=1
    )
    page = service.scanJobs(me, request)
    scanned, continuation = scanned + len(page.scannedJobs), page.continuation
print("scanned", scanned)

later = PinLaterGetJobCountRequest(queue, PinLaterJobState.PENDING, countFutureJobs=True)
print("counted", service.getJobCount(me, later))

try:
    service.enqueueJobs(me, PinLaterEnqueueRequest("nowhere", jobs))
except PinLaterException as error:
    print("refused", error.errorCode, error.message)
try:
    service.deleteQueue(me, queue, "a wrong password")
except PinLaterException as error:
    print("refused", error.errorCode, error.message)
connection.close()
