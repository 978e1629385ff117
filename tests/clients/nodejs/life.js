// The whole life of a job, with Apache Thrift's own library for Node.js.
//
//     npm install thrift
//     thrift --gen js:node,es6 -out gen thrift/pinlater.thrift
//     NODE_PATH=gen:node_modules node life.js 9010 mail framed binary
"use strict";

const thrift = require("thrift");
const PinLater = require("PinLater");
const types = require("pinlater_types");

const [port, queue, transport, protocol] = process.argv.slice(2);
const TRANSPORTS = { framed: thrift.TFramedTransport, unframed: thrift.TBufferedTransport };
const PROTOCOLS = { binary: thrift.TBinaryProtocol, compact: thrift.TCompactProtocol };

const connection = thrift.createConnection("127.0.0.1", Number(port), {
  transport: TRANSPORTS[transport],
  protocol: PROTOCOLS[protocol],
});
const service = thrift.createClient(PinLater, connection);
const me = new types.RequestContext({ source: "life:nodejs" });
const { PENDING, SUCCEEDED } = types.PinLaterJobState;

function nameOf(state) {
  return Object.keys(types.PinLaterJobState).find((name) => types.PinLaterJobState[name] === state);
}

async function life() {
  await service.createQueue(me, queue);
  const queues = await service.getQueueNames(me);
  console.log(queues.includes(queue) ? "created" : "missing");

  const jobs = [
    new types.PinLaterJob({ body: Buffer.from([0x00, 0xff, 0x0a, 0x80]) }),
    new types.PinLaterJob({
      body: Buffer.from("grüße, 世界"),
      numAttemptsAllowed: 5,
      customStatus: "né; ",
    }),
    new types.PinLaterJob({ body: Buffer.from("step 1"), priority: 3 }),
  ];
  const enqueue = new types.PinLaterEnqueueRequest({ queueName: queue, jobs });
  const descriptors = (await service.enqueueJobs(me, enqueue)).jobDescriptors;
  const [raw, text, steps] = descriptors;

  const dequeue = new types.PinLaterDequeueRequest({ queueName: queue, limit: 10 });
  const claimed = await service.dequeueJobs(me, dequeue);
  for (const descriptor of descriptors) {
    const about = claimed.jobMetadata[descriptor];
    const attempts = `${about.attemptsRemaining} of ${about.attemptsAllowed} attempts`;
    const body = claimed.jobs[descriptor].toString("hex");
    console.log("claimed", body, attempts, `${about.claimTimeoutSeconds} s`);
  }

  // Acks and checkpoints name the claim: they apply only as long as it holds.
  const claimOf = (descriptor) => claimed.jobMetadata[descriptor].claimDescriptor;
  const acks = new types.PinLaterJobAckRequest({
    queueName: queue,
    jobsSucceeded: [
      new types.PinLaterJobAckInfo({
        jobDescriptor: raw,
        appendCustomStatus: "sent ✓",
        claimDescriptor: claimOf(raw),
      }),
    ],
    jobsFailed: [
      new types.PinLaterJobAckInfo({
        jobDescriptor: text,
        appendCustomStatus: "später",
        retryDelayMillis: 3_600_000,
        claimDescriptor: claimOf(text),
      }),
    ],
  });
  await service.ackDequeuedJobs(me, acks);

  // The third job saves how far it got, and goes back to the queue.
  const saved = new types.PinLaterCheckpointJobRequest({
    jobDescriptor: steps,
    newBody: "step 2",
    moveToPending: true,
    prependCustomStatus: "½",
    claimDescriptor: claimOf(steps),
  });
  const requests = [saved];
  const checkpoint = new types.PinLaterCheckpointJobsRequest({ queueName: queue, requests });
  await service.checkpointJobs(me, checkpoint);
  const again = await service.dequeueJobs(me, dequeue);
  console.log("claimed again", again.jobs[steps].toString());
  const jobsSucceeded = [new types.PinLaterJobAckInfo({ jobDescriptor: steps })];
  const last = new types.PinLaterJobAckRequest({ queueName: queue, jobsSucceeded });
  await service.ackDequeuedJobs(me, last);

  const lookup = { jobDescriptors: descriptors, includeBody: true };
  const found = await service.lookupJobs(me, new types.PinLaterLookupJobRequest(lookup));
  for (const descriptor of descriptors) {
    const info = found[descriptor];
    const left = `${info.attemptsRemaining} left`;
    const body = info.body.toString("hex");
    console.log("found", nameOf(info.jobState), left, body, info.customStatus);
  }
  const { runAfterTimestampMillis, updatedAtTimestampMillis } = found[text];
  console.log("delayed", runAfterTimestampMillis - updatedAtTimestampMillis, "ms");

  let scanned = 0;
  let continuation = types.CONTINUATION_START;
  while (continuation !== types.CONTINUATION_END) {
    const scan = { queueName: queue, jobState: SUCCEEDED, continuation, limit: 1 };
    const page = await service.scanJobs(me, new types.PinLaterScanJobsRequest(scan));
    scanned += page.scannedJobs.length;
    continuation = page.continuation;
  }
  console.log("scanned", scanned);

  const later = { queueName: queue, jobState: PENDING, countFutureJobs: true };
  const count = await service.getJobCount(me, new types.PinLaterGetJobCountRequest(later));
  console.log("counted", count);

  const nowhere = new types.PinLaterEnqueueRequest({ queueName: "nowhere", jobs });
  for (const refused of [
    () => service.enqueueJobs(me, nowhere),
    () => service.deleteQueue(me, queue, "a wrong password"),
  ]) {
    try {
      await refused();
    } catch (error) {
      if (!(error instanceof types.PinLaterException)) throw error;
      console.log("refused", error.errorCode, error.message);
    }
  }
}

connection.on("error", (error) => {
  throw error;
});
life().finally(() => connection.end());
